-- KEYS[1] a list of parked messages; ARGV[1] the fence that was seen in it, empty if there was none, ARGV[2] the new owner's. 0: it is
-- another's by now. Written also if it is ours already: replicas that are waited for then have it.
local fence = redis.call('HGET', KEYS[1], 'f') or ''
if fence ~= ARGV[1] and fence ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'f', ARGV[2])
return 1
