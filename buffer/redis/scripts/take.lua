-- Lease the `num` ready groups that become too old first, or none if fewer are ready, or if without
-- a group that is still open one of the live groups would become too old before its turn.
--
-- ARGV[2]  fence   ARGV[3] num   ARGV[4] policy_version of the trainer   ARGV[5] token of this take
-- Returns  {'ok', 1, leases, deadline ms, field, field, ...} with leases as MessagePack
--          [[group_id, slot, size, task_id, [episode_id, ...], age limit], ...] and, for every episode in turn, its
--          opening, closure, reward and closed, or
--          {'ok', 0, ready groups, attempts in flight, open groups, 1 if slow groups are waited
--          for}; fence; replaced: since the trainer's start too large a share of attempts ended
--          without a result.
-- Keeps    every live group can still be trained in time by one batch a step; a leased group is fresh
--          enough for policy_version, and what is not is played again; the same token returns the
--          same leases. Sweeps first; credits held since a drop are released, because the trainer
--          needs groups now, unless servers still load its weights. With pipeline_depth = "auto" it adapts how many groups are admitted.

-- With fewer attempts the share means little.
local MIN_ATTEMPTS = 200

local function too_many_replaced()
  local c = redis.call('HMGET', COUNTERS, 'train_attempts', 'resultless_attempts')
  local base = redis.call('HMGET', STATE, 'base_attempts', 'excused_attempts')
  local attempts = (number(c[1]) or 0) - (number(base[1]) or 0)
  local resultless = (number(c[2]) or 0) - (number(base[2]) or 0)
  if attempts < MIN_ATTEMPTS or resultless <= rules.max_replaced_share * attempts then
    return nil
  end
  local worst = redis.call('ZREVRANGE', key('replaced_tasks'), 0, 0, 'WITHSCORES')
  local most = worst[1] and (', most often of task_id=' .. worst[1] .. ' (' .. worst[2] .. ')') or ''
  local parts = redis.call('HMGET', COUNTERS, 'resultless:cut', 'resultless:stale',
    'resultless:failed')
  local were = redis.call('HMGET', STATE, 'excused:cut', 'excused:stale', 'excused:failed')
  local num_failed, causes = resultless, {}
  local sentences = {
    '%d were cut by their group\'s deadline: raise buffer.group_deadline_s, or leave it out',
    '%d were too old to be trained: lower buffer.pipeline_depth or raise buffer.max_staleness',
    '%d were scored in groups that too few others finished'}
  for i = 1, 3 do
    local part = (number(parts[i]) or 0) - (number(were[i]) or 0)
    num_failed = num_failed - part
    if part > 0 then causes[#causes + 1] = string.format(sentences[i], part) end
  end
  if num_failed > 0 then
    table.insert(causes, 1, string.format('%d failed or were lost%s: look for what failed in the '
      .. 'logs of the runners, the router and the servers', num_failed, most))
  end
  return {'replaced', string.format('%d of %d attempts since the trainer started ended without a '
    .. 'result that is trained; env.max_replaced_share=%g allows a share of %g. Training on the '
    .. 'rest would favour short episodes. %s. Then start the run again, which resumes; or raise '
    .. 'env.max_replaced_share', resultless, attempts, rules.max_replaced_share,
    rules.max_replaced_share, table.concat(causes, '; '))}
end

local function answer(packed, leases, deadline)
  local found = {'ok', 1, packed, deadline}
  for _, lease in ipairs(leases) do
    for _, episode_id in ipairs(lease[5]) do
      local f = redis.call('HMGET', episode_key(episode_id), 'opening', 'closure', 'reward', 'closed',
        'refusals')
      for i = 1, 5 do found[#found + 1] = f[i] end
    end
  end
  return found
end

allow_when_full()
sweep()
local refused = fence_refusal(ARGV[2])
if refused then return refused end
local last = redis.call('GET', key('last_take'))
if last and string.sub(last, 1, #ARGV[5]) == ARGV[5] then
  local packed = string.sub(last, #ARGV[5] + 1)
  return answer(packed, cmsgpack.unpack(packed), redis.call('HGET', STATE, 'fence_deadline'))
end
refused = too_many_replaced()
if refused then return refused end
-- While servers load the trainer's weights, what starts is by weights one publish older: it would be
-- too old before its turn.
if (number(redis.call('HGET', STATE, 'acknowledged')) or -1) >= tonumber(ARGV[4]) then
  release_held_credits()
end
local num = tonumber(ARGV[3])
redis.call('HSET', STATE, 'wanted', num)
local depth = depth_of(ARGV[4]) or tonumber(ARGV[4])
repair_stale(depth)

-- EDF: with one batch a step, groups that are due within j more steps fit into j batches. What does
-- not has to be in this one. (Earliest deadline first: Liu and Layland 1973, for equal tasks.)
local function is_held(ready)
  local batch, age = rules.groups_per_step, max_age()
  local num_live = redis.call('ZCARD', READY) + redis.call('ZCARD', OPEN)
  local steps = 0
  -- No live group is younger than the trainer's weights: beyond its age all fit.
  while steps < age and steps * batch < num_live do
    local first_later = (depth - age + steps + 1) * SLOTS
    local bound = '(' .. depth_score(depth - age + steps + 1, 0)
    local num_due = redis.call('ZCOUNT', READY_DEPTHS, '-inf', bound)
      + redis.call('ZCOUNT', OPEN_DEPTHS, '-inf', bound)
    local num_here = 0
    for i = 2, #ready, 2 do
      if tonumber(ready[i]) < first_later then num_here = num_here + 1 end
    end
    if num_here < math.min(num, num_due - steps * batch) then return true end
    steps = steps + 1
  end
  return false
end

-- How long the trainer waits, and for what: `short` of ready groups, or `slow` groups that may not
-- become too old. cause is nil when it waits no longer.
local function note_wait(cause)
  local s = redis.call('HMGET', STATE, 'wait_cause', 'wait_since')
  if s[1] then
    local ms = math.max(now - tonumber(s[2]), 0)
    count('wait_ms:' .. s[1], ms)
    redis.call('HINCRBY', STATE, 'waited:' .. s[1], ms)
  end
  if cause then
    redis.call('HSET', STATE, 'wait_cause', cause, 'wait_since', now)
  else
    redis.call('HDEL', STATE, 'wait_cause', 'wait_since')
  end
end

-- The controller of pipeline_depth = "auto", once for each batch. The trainer's waits are averaged
-- over about four steps. It starts more groups where the trainer lacks ready ones because admission
-- ended and servers have room, and fewer where groups are left over at every take, or where it waits for slow ones, which
-- more groups would make wait longer.
local TOLERATED_WAIT, WEIGHT_OF_PAST, TAKES_BEFORE_LOWERING = 0.05, 0.75, 4
local function adapt_depth()
  local s = redis.call('HMGET', STATE, 'leased_at', 'waited:short', 'waited:slow', 'mean_period',
    'mean_short', 'mean_slow', 'least_left', 'takes_since', 'depth_reached')
  redis.call('HSET', STATE, 'leased_at', now, 'waited:short', 0, 'waited:slow', 0)
  redis.call('HDEL', STATE, 'depth_reached')
  if rules.pipeline_depth ~= 'auto' or not s[1] then return end
  local function mean(before, value) return WEIGHT_OF_PAST * (number(before) or 0) + value end
  local period = mean(s[4], math.max(now - tonumber(s[1]), 1))
  local short, slow = mean(s[5], number(s[2]) or 0), mean(s[6], number(s[3]) or 0)
  local left = redis.call('ZCARD', READY)
  local least, takes = math.min(number(s[7]) or left, left), (number(s[8]) or 0) + 1
  local _, beyond, most = admission()
  local step, change, cause = math.max(1, math.floor(rules.groups_per_step / 8)), 0, 'kept'
  local is_short, is_slow = short > TOLERATED_WAIT * period, slow > TOLERATED_WAIT * period
  if is_short and short > slow then
    if beyond >= most then
      cause = 'limited_by_age'
    elseif s[9] == 'servers' then
      cause = 'limited_by_servers'
    elseif s[9] then
      cause, change = 'raised', math.min(step, most - beyond)
    else
      cause = 'limited_by_places'
    end
  elseif takes >= TAKES_BEFORE_LOWERING then
    if not is_short and not is_slow and least > 0 then
      change = -math.max(1, math.floor(least / 2))
    elseif is_slow and short < slow / 4 then
      change = -step
    end
    change = math.max(change, -beyond)
    if change < 0 then cause = 'lowered' end
    least, takes = left, 0
  end
  if change > 0 then least, takes = left, 0 end
  count('depth:' .. cause)
  redis.call('HSET', STATE, 'groups_beyond', beyond + change, 'depth_cause', cause,
    'mean_period', period, 'mean_short', short, 'mean_slow', slow, 'least_left', least,
    'takes_since', takes)
end

local ready = redis.call('ZRANGE', READY_DEPTHS, 0, num - 1, 'WITHSCORES')
local is_short = #ready < 2 * num
if is_short or is_held(ready) then
  note_wait(is_short and 'short' or 'slow')
  return {'ok', 0, redis.call('ZCARD', READY), redis.call('HLEN', ATTEMPTS),
    redis.call('ZCARD', OPEN), is_short and 0 or 1}
end
note_wait(nil)
local leases, ids, slots = {}, {}, {}
for i = 1, #ready, 2 do
  local group_id = ready[i]
  local g = group_key(group_id)
  local f = redis.call('HMGET', g, 'size', 'task_id', 'slot')
  local slot = f[3]
  redis.call('HSET', g, 'state', 'leased')
  leases[#leases + 1] = {group_id, tonumber(slot), tonumber(f[1]), f[2],
    redis.call('LRANGE', g .. ':episodes', 0, -1), max_age()}
  ids[#ids + 1] = group_id
  slots[#slots + 1] = slot
  slots[#slots + 1] = group_id
end
-- They are the lowest of their scores.
redis.call('ZREMRANGEBYRANK', READY_DEPTHS, 0, num - 1)
send_all(ids, function(...) redis.call('ZREM', READY, ...) end)
if num >= rules.groups_per_step then adapt_depth() end
send_all(slots, function(...) redis.call('ZADD', LEASES, ...) end)
local deadline = now + rules.lease_ms
redis.call('HSET', STATE, 'fence_deadline', deadline)
local packed = cmsgpack.pack(leases)
redis.call('SET', key('last_take'), ARGV[5] .. packed)
count('leased', #leases)
return answer(packed, leases, tostring(deadline))
