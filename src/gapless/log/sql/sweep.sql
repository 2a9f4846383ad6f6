-- One chunk of what nobody can read any more: events at or below a floor, removed sessions.
-- (CROSS JOIN keeps SQLite to this order: a look-up per session, not a scan of every segment.)

DELETE FROM segment WHERE id IN (
    SELECT segment.id FROM session CROSS JOIN segment ON segment.session = session.id
    WHERE segment.last <= session.floor LIMIT 256
);
DELETE FROM inbox WHERE id IN (
    SELECT inbox.id FROM session JOIN inbox ON inbox.session = session.id
    WHERE session.key IS NULL LIMIT 256
);
DELETE FROM session WHERE key IS NULL
    AND NOT EXISTS (SELECT 1 FROM segment WHERE segment.session = session.id)
    AND NOT EXISTS (SELECT 1 FROM inbox WHERE inbox.session = session.id);
