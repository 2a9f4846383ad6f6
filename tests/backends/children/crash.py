"""Answers as many requests as it is told; at the next it tells some progress, and crashes half-way."""

import os
import sys

answers, ending = int(sys.argv[1]), sys.argv[2]
for line in sys.stdin.buffer:
    if not answers:
        break
    answers -= 1
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
progress = b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":1,"progress":%d}}\n'
os.write(1, progress % 1 + progress % 2 + b'{"jsonrpc":"2.0","id":9,"result":{')
if ending.startswith("-"):
    os.kill(os.getpid(), -int(ending))
os._exit(int(ending))
