-- The run's rules, its clock, and the transitions that several scripts share.
--
-- Invariants that all scripts keep:
--   an attempt is in `attempts` exactly while it is claimed and neither scored nor lost;
--   size = scored + lost + pending + attempts in flight, for every open group;
--   admitted - trained = live groups that are not trained yet + held credits;
--   attempts started = attempts in the columns of `ledger` + attempts that are open: in flight,
--   waiting to be resumed, or scored in a group that is neither trained nor dropped.

local given = redis.call('HMGET', KEYS[1], 'group_size', 'groups_per_step', 'max_staleness',
  'max_replacements', 'attempt_ms', 'group_ms', 'lease_ms', 'gives_claims',
  'max_replaced_ppm', 'incomplete', 'pipeline_depth', 'max_resumptions', 'max_silence_ms',
  'over_provision_ppm')
local rules = {
  group_size = tonumber(given[1]), groups_per_step = tonumber(given[2]),
  max_staleness = tonumber(given[3]), max_replacements = tonumber(given[4]),
  attempt_ms = tonumber(given[5]), group_ms = tonumber(given[6]),
  lease_ms = tonumber(given[7]), gives_claims = given[8] == '1',
  max_replaced_share = (tonumber(given[9]) or 1000000) / 1000000,
  incomplete = given[10] or 'train', pipeline_depth = given[11],
  max_resumptions = tonumber(given[12]) or 0, max_silence_ms = tonumber(given[13]) or 0,
  over_provision_ppm = tonumber(given[14]),
}
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Closed or dropped things stay this long as hashes, so that repeated calls get the same answer.
local RETENTION_MS = 3600000
local MIN_SCORED = 2
local SWEEP_LIMIT = 256
-- Dead letters kept, and how many of the newest keep their episodes.
local MAX_DEAD_LETTERS, MAX_WHOLE_DEAD_LETTERS = 256, 16
local MAX_FAILED = 64

local STATE, OPEN, REPLAY = key('state'), key('open'), key('replay')
local GROUPS, FILL, GROUP_DEADLINES = key('groups'), key('fill'), key('group_deadlines')
local READY, READY_DEPTHS, LEASES = key('ready'), key('ready_depths'), key('leases')
local OPEN_DEPTHS = key('open_depths')
local ATTEMPT_DEADLINES, ATTEMPT_RUNNERS = key('attempt_deadlines'), key('attempt_runners')
local ATTEMPT_STARTS, LEDGER = key('attempt_starts'), key('ledger')
local RUNNERS, WAKE, DEAD = key('runners'), key('wake'), key('dead')
local FAILED, ARCHIVE = key('failed'), key('archive')
local function group_key(group_id) return prefix .. 'group:' .. group_id end
local function eval_key(name) return prefix .. 'eval:' .. name end

-- Hand `arguments` to `send`, as many at once as Lua may unpack: a call costs more than what most
-- commands do. An even number, for arguments in pairs.
local function send_all(arguments, send)
  for first = 1, #arguments, 1000 do
    send(unpack(arguments, first, math.min(first + 999, #arguments)))
  end
end

-- A full Redis refuses a script's first memory-taking command. Scripts that give memory back
-- start with this write, which is never refused.
local function allow_when_full() redis.call('DEL', key('nothing')) end

-- Its turns go when nothing needs them any more: neither the list of failed episodes nor the archiver.
local function free_episode(e)
  local f = redis.call('HMGET', e, 'kept', 'archiving')
  if f[1] or f[2] then
    redis.call('HSET', e, 'freed', 1)
    return
  end
  redis.call('DEL', e .. ':turns')
  redis.call('PEXPIRE', e, RETENTION_MS)
end

local function stop_needing(e, field)
  redis.call('HDEL', e, field)
  if redis.call('HEXISTS', e, 'freed') == 1 then free_episode(e) end
end

-- An episode, and those that it resumed. One that failed lately is freed when others have failed.
local function discard_episode(episode_id)
  repeat
    local e = episode_key(episode_id)
    free_episode(e)
    episode_id = redis.call('HGET', e, 'resumes')
  until not episode_id
end

-- Take the `num` oldest entries of the archive's queue off, and free what only they kept.
local function shorten_archive(num)
  for _ = 1, num do
    local entry = redis.call('LPOP', ARCHIVE)
    if not entry then return end
    local fields = cmsgpack.unpack(entry)
    redis.call('HINCRBY', STATE, 'archive_head', 1)
    add(STATE, 'archive_tokens', -fields[5])
    stop_needing(episode_key(fields[1]), 'archiving')
  end
end

-- Ids of turns that may wait for the archiver; 0: there is none.
local function archive_limit() return number(redis.call('HGET', STATE, 'archive_limit')) or 0 end

-- What becomes of an episode is decided: its turns stay until the archiver has them, once. Without an
-- archiver nothing waits, and a queue that is too long loses its oldest entries.
-- `about`: slot and size of its group, version that trained it, as far as there are any.
local function archive_episode(episode_id, fate, reason, about)
  local limit, e = archive_limit(), episode_key(episode_id)
  local f = redis.call('HMGET', e, 'opening', 'archived', 'tokens')
  if limit == 0 or not f[1] or f[2] then return end
  local tokens = number(f[3]) or 0
  redis.call('HSET', e, 'archived', 1, 'archiving', 1)
  redis.call('RPUSH', ARCHIVE, cmsgpack.pack({episode_id, fate, reason, now, tokens,
    number(about[1]) or -1, number(about[2]) or 0, number(about[3]) or -1}))
  local waiting = redis.call('HINCRBY', STATE, 'archive_tokens', tokens)
  while waiting > limit and redis.call('LLEN', ARCHIVE) > 1 do
    shorten_archive(1)
    count('archive_overflow')
    waiting = tonumber(redis.call('HGET', STATE, 'archive_tokens'))
  end
end

local function archive_scored(group_id, fate, reason, version)
  if archive_limit() == 0 then return end
  local g = group_key(group_id)
  local f = redis.call('HMGET', g, 'slot', 'size', 'trained_version')
  for _, episode_id in ipairs(redis.call('LRANGE', g .. ':episodes', 0, -1)) do
    archive_episode(episode_id, fate, reason, {f[1], f[2], fate == 'trained' and (f[3] or version)})
  end
end

-- The last episodes that failed are kept for a person to look at, whatever happens to their groups.
local function keep_failed(episode_id)
  redis.call('HSET', episode_key(episode_id), 'kept', 1)
  if redis.call('RPUSH', FAILED, episode_id) <= MAX_FAILED then return end
  stop_needing(episode_key(redis.call('LPOP', FAILED)), 'kept')
end

local function resumable_key(group_id) return group_key(group_id) .. ':resumable' end

-- The lost episode that a claimed attempt resumes, if any.
local function source_of(group_id, attempt)
  return redis.call('HGET', group_key(group_id), 'resumes:' .. attempt)
end

-- Upper bounds of the ledger's buckets.
local DURATION_BOUNDS_S = {1, 3, 10, 30, 100, 300, 1000, 3000, 10000}
local TOKEN_BOUNDS = {10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000}

local function bound_of(value, bounds)
  for _, bound in ipairs(bounds) do
    if value <= bound then return bound end
  end
  return 'inf'
end

-- Count one attempt in a hash: their number, total duration and tokens, and a bucket of each; or
-- take it out again (`sign` is -1).
local function add_to(hash, beginning, ms, tokens, sign)
  redis.call('HINCRBY', hash, beginning .. ':n', sign)
  add(hash, beginning .. ':ms', sign * ms)
  add(hash, beginning .. ':tokens', sign * tokens)
  redis.call('HINCRBY', hash, beginning .. ':s:' .. bound_of(ms / 1000, DURATION_BOUNDS_S), sign)
  redis.call('HINCRBY', hash, beginning .. ':t:' .. bound_of(tokens, TOKEN_BOUNDS), sign)
end

-- An attempt ended: enter it into its column.
local function enter(purpose, column, ms, tokens)
  local kind = purpose == 't' and 'train' or 'eval'
  add_to(LEDGER, kind .. ':' .. column, ms, tokens, 1)
end

-- Enter a group's scored attempts into a column, or take them out again (`sign` is -1).
local function enter_scored(group_id, column, sign)
  local fields = redis.call('HGETALL', group_key(group_id))
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 7) == 'ledger:' then
      local name = 'train:' .. column .. string.sub(fields[i], 7)
      add(LEDGER, name, sign * tonumber(fields[i + 1]))
    end
  end
end

-- How long an attempt has gone on, ms, and how many tokens were sampled in its episode.
local function length_of(started, episode_id)
  local tokens = 0
  if episode_id and episode_id ~= '' then
    local f = redis.call('HMGET', episode_key(episode_id), 'num_tokens', 'started')
    tokens, started = number(f[1]) or 0, started or number(f[2])
  end
  return math.max(now - (started or now), 0), tokens
end

-- Its episode (empty: none was opened; false: it is not in flight) and when it started.
local function release_attempt(member)
  local episode_id = redis.call('HGET', ATTEMPTS, member)
  local started = number(redis.call('HGET', ATTEMPT_STARTS, member))
  redis.call('HDEL', ATTEMPTS, member)
  redis.call('HDEL', ATTEMPT_STARTS, member)
  redis.call('ZREM', ATTEMPT_DEADLINES, member)
  redis.call('HDEL', ATTEMPT_RUNNERS, member)
  return episode_id, started
end

local function discard_episodes(list)
  for _, episode_id in ipairs(redis.call('LRANGE', list, 0, -1)) do discard_episode(episode_id) end
  redis.call('DEL', list)
end

-- The attempts of a group that are in flight, or wait to be resumed, end in `column`. Returns how
-- many they are.
local function release_attempts_of(group_id, column)
  local next_attempt, num_released = redis.call('HGET', group_key(group_id), 'next_attempt'), 0
  local place = redis.call('HMGET', group_key(group_id), 'slot', 'size')
  for attempt = 0, tonumber(next_attempt) - 1 do
    local episode_id, started = release_attempt('t:' .. group_id .. ':' .. attempt)
    if episode_id then
      if episode_id == '' then episode_id = source_of(group_id, attempt) end
      enter('t', column, length_of(started, episode_id))
      num_released = num_released + 1
      if episode_id then
        archive_episode(episode_id, 'lost', 'cut', place)
        discard_episode(episode_id)
      end
    end
  end
  for _, episode_id in ipairs(redis.call('LRANGE', resumable_key(group_id), 0, -1)) do
    enter('t', column, length_of(nil, episode_id))
    archive_episode(episode_id, 'lost', 'cut', place)
    num_released = num_released + 1
  end
  discard_episodes(resumable_key(group_id))
  return num_released
end

-- Take a group out of every index and free its data; its hash answers late calls for a while.
local function end_group(group_id, state, column)
  local g = group_key(group_id)
  release_attempts_of(group_id, column)
  discard_episodes(g .. ':episodes')
  for _, index in ipairs({GROUPS, OPEN, OPEN_DEPTHS, FILL, GROUP_DEADLINES, READY, READY_DEPTHS,
      LEASES}) do
    redis.call('ZREM', index, group_id)
  end
  redis.call('HSET', g, 'state', state)
  redis.call('PEXPIRE', g, RETENTION_MS)
end

local function dead_letter_key(group_id) return prefix .. 'dead:' .. group_id end

local function discard_dead_letter(group_id)
  discard_episodes(dead_letter_key(group_id) .. ':episodes')
  redis.call('DEL', dead_letter_key(group_id))
end

-- Keep the data of a group that is about to be dropped, for a person to look at.
local function write_dead_letter(group_id, reason, sentence)
  local g, letter = group_key(group_id), dead_letter_key(group_id)
  redis.call('HSET', letter, 'reason', reason, 'sentence', sentence, 'at', now)
  for _, field in ipairs({'slot', 'task_id', 'size', 'scored', 'lost', 'replaced',
      'last_closure'}) do
    redis.call('HSET', letter, field, redis.call('HGET', g, field) or '')
  end
  if redis.call('EXISTS', g .. ':episodes') == 1 then
    redis.call('RENAME', g .. ':episodes', letter .. ':episodes')
  end
  if redis.call('RPUSH', DEAD, group_id) > MAX_DEAD_LETTERS then
    discard_dead_letter(redis.call('LPOP', DEAD))
  end
  local shortened = redis.call('LINDEX', DEAD, -1 - MAX_WHOLE_DEAD_LETTERS)
  if shortened then discard_episodes(dead_letter_key(shortened) .. ':episodes') end
end

-- Its credit returns at once, or with the next take or mark_trained when `hold` is set. A group
-- dropped with a `sentence` leaves a dead letter.
local function drop_group(group_id, reason, replay, hold, sentence)
  local f = redis.call('HMGET', group_key(group_id), 'slot', 'state', 'scored')
  local slot, column = f[1], 'dropped/' .. reason
  archive_scored(group_id, 'dropped', reason)
  if sentence then write_dead_letter(group_id, reason, sentence) end
  if f[2] == 'trained' then enter_scored(group_id, 'trained', -1) end
  enter_scored(group_id, column, 1)
  end_group(group_id, 'dropped', column)
  -- Slow attempts are lost like this too, so they count against env.max_replaced_share.
  if reason == 'stale' or reason == 'failed' then
    count('resultless_attempts', f[3])
    count('resultless:' .. reason, f[3])
  end
  count('dropped:' .. reason)
  if hold then
    redis.call('HINCRBY', STATE, 'held', 1)
  else
    redis.call('HINCRBY', STATE, 'admitted', -1)
  end
  if replay then redis.call('ZADD', REPLAY, slot, slot) end
end

local function release_held_credits()
  local held = number(redis.call('HGET', STATE, 'held')) or 0
  if held > 0 then
    add(STATE, 'admitted', -held)
    redis.call('HSET', STATE, 'held', 0)
  end
end

-- By depth, then by slot: the next groups are at the front, where few nodes are visited.
-- Exact below 2^21 publishes of 2^32 slots.
local SLOTS = 4294967296
local function depth_score(depth, slot)
  return string.format('%.0f', depth * SLOTS + slot)
end

-- How old a trained token may be, in publishes. Groups that over-provision carries into the next
-- step are one publish old there, also in a run that is synchronous otherwise.
local function max_age()
  return math.max(rules.max_staleness, rules.over_provision_ppm > 1000000 and 1 or 0)
end

-- The groups that are started for a step, those that are started beyond them, and how many these
-- may be at most: with one batch taken a step, what is more becomes too old before its turn.
local function admission()
  local batch = rules.groups_per_step
  local limit = (max_age() + 1) * batch
  local provided = math.min(math.ceil(batch * rules.over_provision_ppm / 1000000), limit)
  local beyond
  if rules.pipeline_depth == 'auto' then
    beyond = number(redis.call('HGET', STATE, 'groups_beyond')) or batch
  else
    beyond = math.ceil(tonumber(rules.pipeline_depth) * batch)
  end
  local most = math.min(limit - provided, rules.max_staleness * batch)
  return provided, math.min(beyond, most), most
end

local function make_ready(group_id)
  local g = group_key(group_id)
  local fields = redis.call('HMGET', g, 'slot', 'min_depth', 'state', 'begin_depth')
  if fields[3] == 'trained' then enter_scored(group_id, 'trained', -1) end
  redis.call('HSET', g, 'state', 'ready')
  redis.call('ZREM', LEASES, group_id)
  redis.call('ZADD', READY, fields[1], group_id)
  redis.call('ZADD', READY_DEPTHS, depth_score(tonumber(fields[2] or fields[4]),
    tonumber(fields[1])), group_id)
  local wanted = number(redis.call('HGET', STATE, 'wanted')) or 1
  if redis.call('ZCARD', READY) >= wanted then
    redis.call('LPUSH', WAKE, '1')
    redis.call('LTRIM', WAKE, 0, 0)
  end
end

-- Returns the group's id if it is ready now, nil if it had to be dropped.
local function seal_group(group_id)
  local g = group_key(group_id)
  local num_cut = release_attempts_of(group_id, 'discarded')
  if num_cut > 0 then
    count('resultless_attempts', num_cut)
    count('resultless:cut', num_cut)
  end
  redis.call('ZREM', FILL, group_id)
  redis.call('ZREM', OPEN, group_id)
  redis.call('ZREM', OPEN_DEPTHS, group_id)
  redis.call('ZREM', GROUP_DEADLINES, group_id)
  local f = redis.call('HMGET', g, 'scored', 'size', 'replaced', 'lost')
  -- A group of one is compared with other groups.
  local needed = math.min(MIN_SCORED, tonumber(f[2]))
  if rules.incomplete == 'drop' then needed = tonumber(f[2]) end
  if tonumber(f[1]) < needed then
    drop_group(group_id, 'failed', false, false, 'scored ' .. f[1] .. ' of ' .. f[2]
      .. ' attempts (at least ' .. needed .. ' are needed), replaced ' .. f[3] .. ', given up '
      .. f[4])
    return nil
  end
  redis.call('HSET', g, 'sealed_at', now)
  count('sealed')
  make_ready(group_id)
  return group_id
end

local function seal_if_complete(group_id)
  local f = redis.call('HMGET', group_key(group_id), 'size', 'scored', 'lost')
  if tonumber(f[2]) + tonumber(f[3]) >= tonumber(f[1]) then return seal_group(group_id) end
  return nil
end

local function split_member(member)
  return string.match(member, '^(%a):(.*):(%d+)$')
end

-- Depth of the oldest trained token and newest version of an episode and of those it resumed.
local function extent_of(episode_id)
  local f = redis.call('HMGET', episode_key(episode_id), 'min_depth', 'source_depth',
    'max_version', 'source_version')
  local depth, version = number(f[1]), number(f[3])
  local source_depth, source_version = number(f[2]), number(f[4])
  if source_depth and not (depth and depth < source_depth) then depth = source_depth end
  if source_version and not (version and version > source_version) then version = source_version end
  return depth, version
end

-- False if what the episode recorded is too stale for every batch to come.
local function is_fresh(episode_id)
  local depth = extent_of(episode_id)
  local served = redis.call('HGET', STATE, 'acknowledged')
  if not depth or not served then return true end
  return (depth_of(served) or tonumber(served)) - depth <= max_age()
end

-- An evaluation that newer ones have displaced stays for repeated calls alone, once it is over.
local function expire_eval(name)
  local f = redis.call('HMGET', eval_key(name), 'done', 'total', 'displaced')
  if f[3] and tonumber(f[1]) >= tonumber(f[2]) then
    redis.call('PEXPIRE', eval_key(name), RETENTION_MS)
    redis.call('PEXPIRE', eval_key(name) .. ':rewards', RETENTION_MS)
    discard_episodes(eval_key(name) .. ':episodes')
  end
end

local function count_eval_attempt(name)
  redis.call('HINCRBY', eval_key(name), 'done', 1)
  expire_eval(name)
end

-- The place of a lost attempt is played again from the start, or given up.
local function replace_attempt(purpose, owner, attempt, kind, ms, tokens)
  if purpose == 't' and kind ~= 'stale' then count('resultless_attempts') end
  local owner_key, tally = group_key(owner), 'replaced'
  if purpose == 'e' then owner_key, tally = eval_key(owner), 'replaced:' .. attempt end
  local replaced = number(redis.call('HGET', owner_key, tally)) or 0
  if kind ~= 'stale' and replaced >= rules.max_replacements then
    count('lost_attempts')
    enter(purpose, 'discarded', ms, tokens)
    if purpose == 'e' then
      count_eval_attempt(owner)
    else
      redis.call('HINCRBY', owner_key, 'lost', 1)
      seal_if_complete(owner)
    end
    return
  end
  enter(purpose, 'replaced', ms, tokens)
  if kind ~= 'stale' then redis.call('HINCRBY', owner_key, tally, 1) end
  if purpose == 'e' then
    count('requeued_eval_attempts')
    redis.call('RPUSH', key('eval_queue'), owner .. ':' .. attempt)
  else
    count('replaced:' .. kind)
    redis.call('HINCRBY', owner_key, 'pending', 1)
    redis.call('ZADD', FILL, redis.call('HGET', owner_key, 'slot'), owner)
  end
end

-- Count how far a lost episode had come, under lost or resumed.
local function count_length(episode_id, fate)
  local e = episode_key(episode_id)
  count('turns_of_' .. fate .. '_attempts', redis.call('LLEN', e .. ':turns'))
  count('tokens_of_' .. fate .. '_attempts', redis.call('HGET', e, 'num_tokens') or 0)
end

-- Whether the attempt that came as far as `episode_id` will be resumed; then it is in `resumable`.
local function keep_for_resumption(group_id, episode_id)
  local e = episode_key(episode_id)
  local f = redis.call('HMGET', e, 'resumptions', 'resumes')
  if (number(f[1]) or 0) >= rules.max_resumptions or not is_fresh(episode_id)
      or (redis.call('LLEN', e .. ':turns') == 0 and not f[2]) then
    return false
  end
  redis.call('HINCRBY', e, 'resumptions', 1)
  redis.call('RPUSH', resumable_key(group_id), episode_id)
  redis.call('HINCRBY', group_key(group_id), 'pending', 1)
  redis.call('ZADD', FILL, redis.call('HGET', group_key(group_id), 'slot'), group_id)
  count('resumed_attempts')
  count_length(episode_id, 'resumed')
  return true
end

-- Give up what a place had recorded before it is played from the start.
local function discard_lost(episode_id, group_id, kind)
  local e = episode_key(episode_id)
  archive_episode(episode_id, 'lost', kind,
    group_id and redis.call('HMGET', group_key(group_id), 'slot', 'size') or {})
  count_length(episode_id, 'lost')
  redis.call('ZINCRBY', key('replaced_tasks'), 1, redis.call('HGET', e, 'task_id') or '')
  if group_id then
    redis.call('HSET', group_key(group_id), 'last_closure', redis.call('HGET', e, 'closure') or '')
  end
  discard_episode(episode_id)
end

-- An attempt ended without a result that counts. kind: infrastructure (then what it recorded is
-- resumed, if it may be), environment or stale (its tokens are of an abandoned version; not the
-- task's fault, so it does not use up replacements).
local function lose_attempt(member, kind)
  local purpose, owner, attempt = split_member(member)
  local episode_id, started = release_attempt(member)
  if episode_id == '' and purpose == 't' then episode_id = source_of(owner, attempt) end
  local ms, tokens = length_of(started, episode_id)
  if episode_id and episode_id ~= '' then
    if purpose == 't' and kind == 'infrastructure' and keep_for_resumption(owner, episode_id) then
      return
    end
    discard_lost(episode_id, purpose == 't' and owner, kind)
  end
  if purpose == 'o' then
    count('lost_attempts')
    enter(purpose, 'discarded', ms, tokens)
    return
  end
  replace_attempt(purpose, owner, attempt, kind, ms, tokens)
end

-- A place whose recorded turns became too stale, or belong to an abandoned version, while it
-- waited to be resumed: it is replaced instead. Taken out of `resumable` by the caller.
local function replace_resumable(group_id, episode_id, kind)
  if redis.call('HINCRBY', group_key(group_id), 'pending', -1) == 0 then
    redis.call('ZREM', FILL, group_id)
  end
  local ms, tokens = length_of(nil, episode_id)
  discard_lost(episode_id, group_id, kind)
  replace_attempt('t', group_id, '', kind, ms, tokens)
end

-- An attempt whose tokens are too old for every step to come is played again. Slow attempts meet
-- this more often than others, so it counts against env.max_replaced_share.
local function count_too_old()
  count('resultless_attempts')
  count('resultless:stale')
end

-- A resumed attempt is over: what its earlier episodes recorded is not needed any more. What was
-- not replayed belongs to no episode that counts.
local function discard_sources(episode_id)
  local e = episode_key(episode_id)
  local first = redis.call('HGET', e, 'resumes')
  local source, seen, num_left = first, {}, 0
  while source do
    for _, field in ipairs(redis.call('HKEYS', episode_key(source))) do
      if string.sub(field, 1, 2) == 't:' and not seen[field] then
        seen[field] = true
        if redis.call('HEXISTS', e, field) == 0 then num_left = num_left + 1 end
      end
    end
    source = redis.call('HGET', episode_key(source), 'resumes')
  end
  if first then
    count('turns_not_replayed', num_left)
    discard_episode(first)
  end
end

-- A group holds the tokens of one more scored episode.
local function extend_group(group_id, min_depth, max_version)
  local g = group_key(group_id)
  local seen = redis.call('HMGET', g, 'min_depth', 'max_version')
  if min_depth and (not seen[1] or tonumber(min_depth) < tonumber(seen[1])) then
    redis.call('HSET', g, 'min_depth', min_depth)
  end
  if max_version and (not seen[2] or tonumber(max_version) > tonumber(seen[2])) then
    redis.call('HSET', g, 'max_version', max_version)
  end
end

-- A closed episode has its reward: enter it into its group or evaluation. Returns the group's id if
-- that sealed it, false if the episode is too old and is played again.
local function count_attempt(member, episode_id)
  local purpose, owner, attempt = split_member(member)
  local e = episode_key(episode_id)
  if purpose == 't' and not is_fresh(episode_id) then
    count_too_old()
    lose_attempt(member, 'stale')
    return false
  end
  local f = redis.call('HMGET', e, 'value', 'min_depth', 'max_version', 'min_version')
  local _, started = release_attempt(member)
  local ms, tokens = length_of(started, episode_id)
  redis.call('HSET', e, 'counted', 1, 'ms', ms)
  discard_sources(episode_id)
  if purpose ~= 't' then
    enter(purpose, 'evaluated', ms, tokens)
    archive_episode(episode_id, 'evaluated', '', {})
  end
  if purpose == 'o' then
    -- It belongs to no evaluation; it can be read for as long as a repeated call may come.
    redis.call('PEXPIRE', e .. ':turns', RETENTION_MS)
    redis.call('PEXPIRE', e, RETENTION_MS)
    return nil
  end
  if purpose == 'e' then
    local eval = eval_key(owner)
    redis.call('HSET', eval .. ':rewards', attempt, f[1])
    redis.call('RPUSH', eval .. ':episodes', episode_id)
    count_eval_attempt(owner)
    local of = redis.call('HMGET', eval, 'policy_version', 'newest_version', 'oldest_version')
    local newest, oldest = number(f[3]), number(f[4])
    if newest and newest > tonumber(of[1]) then redis.call('HINCRBY', eval, 'mixed', 1) end
    if oldest and not (of[3] and tonumber(of[3]) <= oldest) then
      redis.call('HSET', eval, 'oldest_version', oldest)
    end
    if newest and newest > (number(of[2]) or -1) then
      redis.call('HSET', eval, 'newest_version', newest)
    end
    return nil
  end
  local g = group_key(owner)
  redis.call('RPUSH', g .. ':episodes', episode_id)
  redis.call('HINCRBY', g, 'scored', 1)
  add_to(g, 'ledger', ms, tokens, 1)
  extend_group(owner, f[2], f[3])
  count('scored')
  return seal_if_complete(owner)
end

-- A scored attempt leaves its group, to be played again.
local function remove_scored(group_id, episode_id)
  local g, e = group_key(group_id), episode_key(episode_id)
  local f = redis.call('HMGET', e, 'ms', 'num_tokens')
  local ms, tokens = number(f[1]) or 0, number(f[2]) or 0
  redis.call('LREM', g .. ':episodes', 0, episode_id)
  redis.call('HINCRBY', g, 'scored', -1)
  add_to(g, 'ledger', ms, tokens, -1)
  discard_lost(episode_id, group_id, 'stale')
  replace_attempt('t', group_id, '', 'stale', ms, tokens)
end

-- Play those attempts of an open or ready group again whose tokens are too old for a trainer at
-- `depth`; the others stay. An attempt that has recorded nothing is looked at when it is scored.
local function repair_group(group_id, depth)
  local g, oldest = group_key(group_id), depth - max_age()
  local begin = depth
  local function is_too_old(tokens_depth, unknown)
    if tokens_depth and tokens_depth < oldest then return true end
    begin = math.min(begin, tokens_depth or unknown)
    return false
  end
  for attempt = 0, tonumber(redis.call('HGET', g, 'next_attempt')) - 1 do
    local member = 't:' .. group_id .. ':' .. attempt
    local episode_id = redis.call('HGET', ATTEMPTS, member)
    if episode_id == '' then episode_id = source_of(group_id, attempt) or '' end
    if episode_id and is_too_old(extent_of(episode_id), oldest) then
      count_too_old()
      lose_attempt(member, 'stale')
    end
  end
  for _, source in ipairs(redis.call('LRANGE', resumable_key(group_id), 0, -1)) do
    if is_too_old(extent_of(source), depth) then
      count_too_old()
      redis.call('LREM', resumable_key(group_id), 0, source)
      replace_resumable(group_id, source, 'stale')
    end
  end
  redis.call('HDEL', g, 'min_depth', 'max_version')
  for _, episode_id in ipairs(redis.call('LRANGE', g .. ':episodes', 0, -1)) do
    local f = redis.call('HMGET', episode_key(episode_id), 'min_depth', 'max_version')
    if is_too_old(number(f[1]), depth) then
      count_too_old()
      remove_scored(group_id, episode_id)
    else
      extend_group(group_id, f[1], f[2])
    end
  end
  local f = redis.call('HMGET', g, 'state', 'pending', 'slot')
  local slot = tonumber(f[3])
  redis.call('HSET', g, 'begin_depth', begin)
  if f[1] == 'ready' and tonumber(f[2]) == 0 then
    redis.call('ZADD', READY_DEPTHS, depth_score(begin, slot), group_id)
    return
  end
  if f[1] == 'ready' then
    count('reopened')
    redis.call('HSET', g, 'state', 'open')
    redis.call('ZREM', READY, group_id)
    redis.call('ZREM', READY_DEPTHS, group_id)
    redis.call('ZADD', OPEN, slot, group_id)
    if rules.group_ms > 0 then
      redis.call('ZADD', GROUP_DEADLINES, now + rules.group_ms, group_id)
    end
  end
  redis.call('ZADD', OPEN_DEPTHS, depth_score(begin, slot), group_id)
end

-- Repair every group that would be too old for a trainer at `depth`.
local function repair_stale(depth)
  local too_old = '(' .. depth_score(depth - max_age(), 0)
  for _, index in ipairs({READY_DEPTHS, OPEN_DEPTHS}) do
    for _, group_id in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', too_old)) do
      repair_group(group_id, depth)
    end
  end
end

-- Give untrained leases back and fence their holder off.
local function release_leases()
  for _, group_id in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
    if redis.call('HGET', group_key(group_id), 'state') == 'leased' then make_ready(group_id) end
  end
end

local function sweep_leases()
  local f = redis.call('HMGET', STATE, 'fence', 'fence_deadline', 'lost_fence')
  if f[2] and now > tonumber(f[2]) and f[3] ~= f[1] and redis.call('ZCARD', LEASES) > 0 then
    redis.call('HSET', STATE, 'lost_fence', f[1])
    release_leases()
    count('expired_leases')
  end
end

-- The attempts of a runner that sends no heartbeat are lost, as at their deadline. If this check did
-- not run for a while, Redis was away or its clock jumped, so old heartbeats mean nothing: then every
-- runner gets its whole time again.
local function sweep_runners()
  local limit = rules.max_silence_ms
  if limit == 0 or redis.call('EXISTS', RUNNERS) == 0 then return end
  local looked_at = number(redis.call('HGET', STATE, 'runners_looked_at'))
  redis.call('HSET', STATE, 'runners_looked_at', now)
  if not looked_at or now < looked_at or now - looked_at > limit / 2 then
    for _, runner_id in ipairs(redis.call('ZRANGE', RUNNERS, 0, -1)) do
      redis.call('ZADD', RUNNERS, now, runner_id)
    end
    return
  end
  local is_silent = {}
  for _, runner_id in ipairs(redis.call('ZRANGEBYSCORE', RUNNERS, '-inf', now - limit)) do
    is_silent[runner_id] = true
    redis.call('ZREM', RUNNERS, runner_id)
  end
  if not next(is_silent) then return end
  local runners = redis.call('HGETALL', ATTEMPT_RUNNERS)
  for i = 1, #runners, 2 do
    -- Losing one attempt may seal its group, which releases the others.
    if is_silent[runners[i + 1]] and redis.call('HEXISTS', ATTEMPTS, runners[i]) == 1 then
      count('silent_attempts')
      lose_attempt(runners[i], 'infrastructure')
    end
  end
end

local function sweep()
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', ATTEMPT_DEADLINES, '-inf', now,
      'LIMIT', 0, SWEEP_LIMIT)) do
    -- Losing one attempt may seal its group, which releases the others.
    if redis.call('HEXISTS', ATTEMPTS, member) == 1 then lose_attempt(member, 'infrastructure') end
  end
  for _, group_id in ipairs(redis.call('ZRANGEBYSCORE', GROUP_DEADLINES, '-inf', now,
      'LIMIT', 0, SWEEP_LIMIT)) do
    seal_group(group_id)
  end
  sweep_runners()
  sweep_leases()
end

-- nil if the caller still holds the fence, else the refusal to return.
local function fence_refusal(fence)
  local f = redis.call('HMGET', STATE, 'fence', 'lost_fence')
  if f[1] ~= fence then
    return {'fence', 'fence=' .. fence .. ' was replaced by fence=' .. (f[1] or 'none')
      .. '; another trainer holds the leases now'}
  end
  if f[2] == fence then
    return {'fence', 'the leases of fence=' .. fence .. ' expired unrenewed and were given back'}
  end
  return nil
end
