-- Open episodes for claimed attempts.
--
-- ARGV[2]  number of openings, then for each: episode_id, member (t:GROUP:ATTEMPT,
--          e:EVAL:ATTEMPT or, for an evaluation episode that nobody claimed, o:EPISODE:0),
--          task_id, its source or '', what must be equal when it is opened again, opening record,
--          deadline in ms from now
-- Returns  {'ok', code, sentence, code, sentence, ...}: one pair per opening. gone: the attempt was
--          replaced or its group sealed; conflict: same id, other content; not_found: no such group.
-- Keeps    an attempt that resumes a lost episode passes that one's id on to its own (`resumes`);
--          one episode per attempt: a later opening of the same attempt takes it over, because the
--          answer to the earlier one may have been lost. Refused openings do not stop the others.

local function open_one(episode_id, member, task_id, source_name, identity, opening, deadline_ms)
  local e = episode_key(episode_id)
  local known = redis.call('HGET', e, 'identity')
  if known then
    if known == identity then return 'ok', '' end
    return 'conflict', 'episode_id=' .. episode_id .. ' is open with another content'
  end
  local purpose, owner, attempt = split_member(member)
  if purpose == 'o' then
    redis.call('HSET', ATTEMPTS, member, '')
    redis.call('HSET', ATTEMPT_STARTS, member, now)
    redis.call('HINCRBY', LEDGER, 'eval:started', 1)
  end
  local owner_key = purpose == 'e' and eval_key(owner) or group_key(owner)
  local bound = redis.call('HGET', ATTEMPTS, member)
  if not bound then
    if redis.call('EXISTS', owner_key) == 0 then
      return 'not_found', 'no group or evaluation ' .. owner
    end
    return 'gone', 'attempt ' .. member .. ' was replaced or is over'
  end
  if purpose == 't' then
    local task = redis.call('HGET', owner_key, 'task_id')
    if task and task ~= task_id then
      return 'conflict', 'group_id=' .. owner .. ' plays task_id=' .. task .. ', not ' .. task_id
    end
    if not task then
      redis.call('HSET', owner_key, 'task_id', task_id, 'source', source_name)
    end
  end
  redis.call('HSET', e, 'identity', identity, 'member', member, 'task_id', task_id,
    'opening', opening, 'started', redis.call('HGET', ATTEMPT_STARTS, member) or now)
  local source = purpose == 't' and source_of(owner, attempt)
  if source then
    local depth, version = extent_of(source)
    redis.call('HSET', e, 'resumes', source, 'source_depth', depth or '', 'source_version',
      version or '', 'resumptions', redis.call('HGET', episode_key(source), 'resumptions') or 0)
  end
  if bound ~= '' then
    -- What both resume stays.
    redis.call('HDEL', episode_key(bound), 'resumes')
    discard_episode(bound)
    count('superseded_episodes')
  end
  redis.call('HSET', ATTEMPTS, member, episode_id)
  redis.call('ZADD', ATTEMPT_DEADLINES, now + tonumber(deadline_ms), member)
  count('episodes')
  return 'ok', ''
end

local answers = {'ok'}
for i = 0, tonumber(ARGV[2]) - 1 do
  local at = 3 + 7 * i
  local code, sentence = open_one(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3],
    ARGV[at + 4], ARGV[at + 5], ARGV[at + 6])
  answers[#answers + 1] = code
  answers[#answers + 1] = sentence
end
return answers
