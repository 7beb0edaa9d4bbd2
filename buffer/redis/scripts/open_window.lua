-- Fix in which order the slots of the next window are played.
--
-- ARGV[2]  its first slot   ARGV[3..] all its slots, in order
-- Returns  {'ok'}
-- Keeps    windows follow each other without a gap, and each is opened once, when all groups of the one
--          before have started: of several routers the first decides.

local cursor = number(redis.call('HGET', STATE, 'cursor')) or 0
if cursor == tonumber(ARGV[2]) and redis.call('EXISTS', WINDOW) == 0 then
  local places = {}
  for i = 3, #ARGV do
    places[#places + 1] = i - 3
    places[#places + 1] = ARGV[i]
  end
  send_all(places, function(...) redis.call('ZADD', WINDOW, ...) end)
  redis.call('HSET', STATE, 'cursor', cursor + #ARGV - 2)
end
return {'ok'}
