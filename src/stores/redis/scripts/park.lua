-- KEYS: a list of parked messages, the set of its places; ARGV: the owner's fence, then place and bytes of each message. 0, and
-- nothing is done: another opened the list last.
if redis.call('HGET', KEYS[1], 'f') ~= ARGV[1] then return 0 end
for i = 2, #ARGV, 2 do
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    redis.call('ZADD', KEYS[2], 0, ARGV[i])
end
return 1
