-- What the writer's connection adds for itself; none of it is in the file.
--
-- Every change of the log is a row inserted into `step`, and a whole group of them is one
-- INSERT, hence one transaction. So the writer thread gives up the interpreter lock once a
-- group: under a busy event loop each time costs it 5 ms to get it back.
--
-- answer(n, value) reports on step n: 0 where it was refused; otherwise the fence it raised, the
-- owner it made, or one more than an owner's losses. litter() reports that there is more to sweep.

CREATE TEMP VIEW step (
    n, op, key,
    number,                     -- write: the last event. entry: its number
    mark,                       -- create, write: the link. entry: the digest
    data,                       -- create: the record. write: the segment. entry: the JSON text. join: the address
    at,                         -- create, write: Unix time
    owner,                      -- create, acquire: NULL if it is to be nobody's. beat, leave
    fence,                      -- write, acquire: what has to hold
    expect, before,             -- write: what has to hold; before: `received`, if there are entries
    received, dispatched, record, floor, floor_link   -- write: NULL where it stays
) AS SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL;

CREATE TEMP TRIGGER step_create INSTEAD OF INSERT ON step WHEN new.op = 'create' BEGIN
    INSERT INTO session
        (key, record, committed, link, floor, floor_link, received, dispatched, fence, created, updated, owner)
        VALUES (new.key, new.data, 0, new.mark, 0, new.mark, 0, 0, 0, new.at, new.at, new.owner)
        ON CONFLICT (key) DO NOTHING;
    SELECT answer(new.n, 0) WHERE changes() = 0;
END;

CREATE TEMP TRIGGER step_write INSTEAD OF INSERT ON step WHEN new.op = 'write' BEGIN
    UPDATE session SET
        committed = new.number,
        link = new.mark,
        received = coalesce(new.received, received),
        dispatched = coalesce(new.dispatched, dispatched),
        record = coalesce(new.record, record),
        floor = max(floor, coalesce(new.floor, 0)),                                      -- L3: never falls
        floor_link = CASE WHEN new.floor > floor THEN new.floor_link ELSE floor_link END,
        updated = new.at
    WHERE key = new.key
        AND committed = new.expect                                                       -- L8
        AND fence <= new.fence                                                           -- N1
        AND received = coalesce(new.before, received);                                   -- L6
    SELECT answer(new.n, 0) WHERE changes() = 0;
    INSERT INTO segment (session, first, last, data, at)
        SELECT id, new.expect + 1, new.number, new.data, new.at FROM session
        WHERE changes() = 1 AND new.number > new.expect AND key = new.key;
END;

-- Comes after its write. Where that was refused, `received` does not cover it, or it is there.
CREATE TEMP TRIGGER step_entry INSTEAD OF INSERT ON step WHEN new.op = 'entry' BEGIN
    INSERT INTO inbox (session, number, digest, data)
        SELECT id, new.number, new.mark, new.data FROM session
        WHERE key = new.key AND received >= new.number
        ON CONFLICT (session, number) DO NOTHING;
END;

-- Comes after a write that moves the floor. What one go does not reach is swept later: no read
-- returns it, and deleting it all at once would hold up everybody's commits.
CREATE TEMP TRIGGER step_evict INSTEAD OF INSERT ON step WHEN new.op = 'evict' BEGIN
    DELETE FROM segment WHERE id IN (
        SELECT segment.id FROM session JOIN segment ON segment.session = session.id
        WHERE session.key = new.key AND segment.last <= session.floor LIMIT 256
    );
    SELECT litter() WHERE changes() = 256;
END;

CREATE TEMP TRIGGER step_acquire INSTEAD OF INSERT ON step WHEN new.op = 'acquire' BEGIN
    UPDATE owner SET losses = losses + 1
        WHERE id = (SELECT owner FROM session WHERE key = new.key AND fence = new.fence)
        AND id IS NOT new.owner;
    UPDATE session SET fence = fence + 1, owner = new.owner
        WHERE key = new.key AND fence = new.fence;                                       -- N1
    SELECT answer(new.n, CASE changes() WHEN 0 THEN 0 ELSE new.fence + 1 END);
END;

CREATE TEMP TRIGGER step_remove INSTEAD OF INSERT ON step WHEN new.op = 'remove' BEGIN
    UPDATE session SET key = NULL, record = x'', floor = committed WHERE key = new.key;
    SELECT litter() WHERE changes() = 1;
END;

CREATE TEMP TRIGGER step_join INSTEAD OF INSERT ON step WHEN new.op = 'join' BEGIN
    INSERT INTO owner (address) VALUES (new.data);
    SELECT answer(new.n, last_insert_rowid());
END;

CREATE TEMP TRIGGER step_beat INSTEAD OF INSERT ON step WHEN new.op = 'beat' BEGIN
    UPDATE owner SET beat = beat + 1 WHERE id = new.owner;
    SELECT answer(new.n, coalesce((SELECT losses + 1 FROM owner WHERE id = new.owner), 0));
END;

CREATE TEMP TRIGGER step_leave INSTEAD OF INSERT ON step WHEN new.op = 'leave' BEGIN
    DELETE FROM owner WHERE id = new.owner;
END;
