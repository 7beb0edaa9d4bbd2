-- Write what parts say of themselves and of the run, also into a full Redis: a trainer that could
-- not say how far it is would never free what the others wait for.
--
-- ARGV[2...] key, field and value, over and over; an empty value removes the field
-- Returns  {'ok'}
-- Keeps    all of it, or nothing

-- Never refused, and neither is what follows it.
redis.call('DEL', key('nothing'))
for i = 2, #ARGV, 3 do
  if ARGV[i + 2] == '' then
    redis.call('HDEL', key(ARGV[i]), ARGV[i + 1])
  else
    redis.call('HSET', key(ARGV[i]), ARGV[i + 1], ARGV[i + 2])
  end
end
return {'ok'}
