-- The usual idempotency script, as the reference: a hash for each record. KEYS[1] record; ARGV: owner, now in ms, lease in ms,
-- life in ms. Answers {0, token} granted, {1, token, result} completed, {2, token, lease end} in flight.
local k = KEYS[1]
local r = redis.call('HMGET', k, 's', 't', 'l', 'r')
if not r[1] then
  redis.call('HSET', k, 's', 'P', 't', 1, 'l', ARGV[2] + ARGV[3], 'o', ARGV[1])
  redis.call('PEXPIRE', k, ARGV[4])
  return {0, 1}
end
if r[1] == 'C' then return {1, tonumber(r[2]), r[4]} end
if tonumber(r[3]) > tonumber(ARGV[2]) then return {2, tonumber(r[2]), r[3]} end
local t = tonumber(r[2]) + 1
redis.call('HSET', k, 's', 'P', 't', t, 'l', ARGV[2] + ARGV[3], 'o', ARGV[1])
redis.call('PEXPIRE', k, ARGV[4])
return {0, t}
