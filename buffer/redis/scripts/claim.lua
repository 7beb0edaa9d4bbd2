-- Give out up to `count` attempts: evaluations that are urgent, then the unfilled places of open
-- groups, oldest slot first, then new groups as far as admission allows, then other evaluations.
--
-- ARGV[2]  idempotency key   ARGV[3] count   ARGV[4] how long the key is remembered, ms
-- ARGV[5]  runner that sends heartbeats, or '': then the attempts have their deadlines alone
-- ARGV[6]  1 if turns wait for room on the servers
-- Returns  {'ok', claims, reason, revision of the weights}; claims is MessagePack
--          [[purpose, group_id or eval name, attempt, slot or index of the evaluation task,
--          sampling JSON or '', episode that the attempt resumes or ''], ...];
--          reason is empty if there are claims.
-- Keeps    no more live groups than buffer.pipeline_depth and buffer.max_staleness allow, nor than the
--          steps to come will train; one slot per live group; the same key returns the same claims. An empty answer is not remembered, and sweeps what passed its deadline.

local done_key = key('claim:' .. ARGV[2])
local revision = number(redis.call('HGET', STATE, 'weights_revision')) or 0
local before = redis.call('GET', done_key)
if before then
  return {'ok', before, '', revision}
end
sweep()

local function refusal()
  local s = redis.call('HMGET', STATE, 'run_state', 'paused', 'announced', 'acknowledged',
    'num_tasks')
  if s[1] ~= 'running' then return 'finished' end
  if not rules.gives_claims then return 'no_tasks' end
  if s[2] == '1' then return 'paused' end
  if not s[3] or not s[4] then return 'not_ready' end
  -- Synchronous: nothing starts under weights that are about to be replaced.
  if rules.max_staleness == 0 and tonumber(s[4]) < tonumber(s[3]) then return 'not_ready' end
  if not s[5] then return 'no_tasks' end
  return nil
end

local has_heartbeat = ARGV[5] ~= '' and rules.max_silence_ms > 0
local function start_attempt(member, kind, source)
  redis.call('HSET', ATTEMPTS, member, '')
  if source then
    -- The same attempt goes on.
    local started = redis.call('HGET', episode_key(source), 'started')
    redis.call('HSET', ATTEMPT_STARTS, member, started or now)
  else
    redis.call('HSET', ATTEMPT_STARTS, member, now)
    redis.call('HINCRBY', LEDGER, kind .. ':started', 1)
  end
  redis.call('ZADD', ATTEMPT_DEADLINES, now + rules.attempt_ms, member)
  if has_heartbeat then redis.call('HSET', ATTEMPT_RUNNERS, member, ARGV[5]) end
  count('attempts')
end

-- The place of an attempt's task among all evaluation tasks; nil: the suite has fewer tasks than the
-- evaluation would play. Its tasks are the first of the suite, each as often as the next.
local function eval_task(name, attempt)
  local f = redis.call('HMGET', eval_key(name), 'suite', 'samples', 'requested')
  local first, count = string.match(redis.call('HGET', STATE, 'suite:' .. f[1]), '^(%d+) (%d+)$')
  count = tonumber(count)
  local samples = tonumber(f[2])
  if samples > 0 then
    if attempt >= count * samples then return nil end
    count = math.min(count, math.floor(tonumber(f[3]) / samples))
  end
  return tonumber(first) + attempt % count
end

local function next_eval()
  local item = redis.call('LPOP', key('eval_queue'))
  if not item then return nil end
  local name, attempt = string.match(item, '^(.*):(%d+)$')
  attempt = tonumber(attempt)
  local task = eval_task(name, attempt)
  if not task then
    redis.call('HINCRBY', eval_key(name), 'total', -1)
    return next_eval()
  end
  start_attempt('e:' .. item, 'eval')
  return {'eval', name, attempt, task, redis.call('HGET', eval_key(name), 'sampling'), ''}
end

-- Whether the next evaluation goes before training: training waits for it, or its version has been
-- replaced, so that it gets the less of that version the longer it waits.
local function is_eval_urgent()
  local item = redis.call('LINDEX', key('eval_queue'), 0)
  if not item then return false end
  local e = redis.call('HMGET', eval_key(string.match(item, '^(.*):%d+$')), 'blocks', 'policy_version')
  return e[1] == '1'
    or (number(e[2]) or 0) < (number(redis.call('HGET', STATE, 'acknowledged')) or 0)
end

-- A slot that is played again, or the next one.
local function next_slot()
  local slot = redis.call('ZRANGE', REPLAY, 0, 0)[1]
  if slot then
    redis.call('ZREM', REPLAY, slot)
    return slot
  end
  return tostring(redis.call('HINCRBY', STATE, 'cursor', 1) - 1)
end

local function mint_group()
  local s = redis.call('HMGET', STATE, 'admitted', 'trained', 'num_tasks', 'steps_left')
  if tonumber(s[3]) == 0 then return nil, 'no_tasks' end
  local num_live = (number(s[1]) or 0) - (number(s[2]) or 0)
  if s[4] and num_live >= tonumber(s[4]) * rules.groups_per_step then return nil, 'admission' end
  local provided, beyond = admission()
  if num_live >= provided + beyond then
    -- So the controller sees what limits: the depth, or the servers behind it.
    redis.call('HSET', STATE, 'depth_reached', ARGV[6] == '1' and 'servers' or 'depth')
    return nil, 'admission'
  end
  local slot = next_slot()
  redis.call('HINCRBY', STATE, 'admitted', 1)
  local group_id = 'g' .. slot .. '-' .. redis.call('HINCRBY', STATE, 'minted', 1)
  local begin = depth_of(redis.call('HGET', STATE, 'acknowledged'))
  redis.call('HSET', group_key(group_id), 'slot', slot, 'size', rules.group_size, 'state', 'open',
    'pending', rules.group_size, 'next_attempt', 0, 'scored', 0, 'lost', 0, 'replaced', 0,
    'begin_depth', begin)
  redis.call('ZADD', GROUPS, slot, group_id)
  redis.call('ZADD', FILL, slot, group_id)
  redis.call('ZADD', OPEN, slot, group_id)
  redis.call('ZADD', OPEN_DEPTHS, depth_score(begin, tonumber(slot)), group_id)
  if rules.group_ms > 0 then
    redis.call('ZADD', GROUP_DEADLINES, now + rules.group_ms, group_id)
  end
  count('groups')
  return group_id, nil
end

local function next_train()
  local group_id, reason = redis.call('ZRANGE', FILL, 0, 0)[1], nil
  if not group_id then
    group_id, reason = mint_group()
    if not group_id then return nil, reason end
  end
  local source = redis.call('LPOP', resumable_key(group_id))
  if source and not is_fresh(source) then
    replace_resumable(group_id, source, 'infrastructure')
    return next_train()
  end
  local g = group_key(group_id)
  local attempt = redis.call('HINCRBY', g, 'next_attempt', 1) - 1
  if redis.call('HINCRBY', g, 'pending', -1) == 0 then redis.call('ZREM', FILL, group_id) end
  start_attempt('t:' .. group_id .. ':' .. attempt, 'train', source)
  if source then
    redis.call('HSET', g, 'resumes:' .. attempt, source)
  else
    count('train_attempts')
  end
  return {'train', group_id, attempt, tonumber(redis.call('HGET', g, 'slot')), '', source or ''}, nil
end

local claims, reason = {}, refusal()
while not reason and #claims < tonumber(ARGV[3]) do
  local claim = is_eval_urgent() and next_eval() or nil
  if not claim then claim, reason = next_train() end
  if not claim then
    claim = next_eval()
    if claim then reason = nil end
  end
  claims[#claims + 1] = claim
end
if #claims == 0 then
  return {'ok', cmsgpack.pack({}), reason or '', revision}
end
if has_heartbeat then redis.call('ZADD', RUNNERS, now, ARGV[5]) end
local packed = cmsgpack.pack(claims)
redis.call('SET', done_key, packed, 'PX', ARGV[4])
return {'ok', packed, '', revision}
