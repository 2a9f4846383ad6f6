-- Version 2: sessions have owners (N1), segments the time of their commit.

CREATE TABLE owner (
    id INTEGER PRIMARY KEY AUTOINCREMENT,   -- a number is never given twice
    address TEXT NOT NULL,
    beat INTEGER NOT NULL DEFAULT 0,
    losses INTEGER NOT NULL DEFAULT 0
) STRICT;

ALTER TABLE session ADD COLUMN owner INTEGER;                -- NULL: none
ALTER TABLE segment ADD COLUMN at REAL NOT NULL DEFAULT 0;   -- Unix time, seconds; 0: written by version 1

CREATE INDEX session_owner ON session (owner) WHERE owner IS NOT NULL;
