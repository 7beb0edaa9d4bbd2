-- The archiver has written the oldest entries of its queue.
--
-- ARGV[2]  number of the first entry after them: entries are numbered from 0 since the run began
-- Returns  {'ok', number of the entry that is the oldest now, entries that wait}
-- Keeps    an episode's turns are freed here, or when its entry was pushed out of the queue, and only
--          if its group, evaluation or dead letter and the list of failed ones need them no more.
--          Twice is once.

allow_when_full()
local head = number(redis.call('HGET', STATE, 'archive_head')) or 0
shorten_archive(math.max(0, tonumber(ARGV[2]) - head))
head = number(redis.call('HGET', STATE, 'archive_head')) or 0
return {'ok', head, redis.call('LLEN', ARCHIVE)}
