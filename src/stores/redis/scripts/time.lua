-- ARGV[1] is the time to decide at, in us; empty: the server's, in the same step.
local now = ARGV[1]
if now == '' then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
else
    now = tonumber(now)
end
