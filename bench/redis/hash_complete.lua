-- KEYS[1] record; ARGV: token, result, life in ms. Answers 1 stored, 0 another owns it, 2 completed already with this token.
local k = KEYS[1]
local r = redis.call('HMGET', k, 's', 't')
if not r[1] then return 0 end
if r[2] ~= ARGV[1] then return 0 end
if r[1] == 'C' then return 2 end
redis.call('HSET', k, 's', 'C', 'r', ARGV[2])
redis.call('PEXPIRE', k, ARGV[3])
return 1
