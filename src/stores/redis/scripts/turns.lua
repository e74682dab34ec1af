-- KEYS[1] a conversation; ARGV: after, limit, whether the newest are wanted. Its head, then the turns, each behind its number.
local head = redis.call('HGET', KEYS[1], 'h')
if not head then return {} end
local _, _, count = struct.unpack('<I8I8I8', head)
local from = math.min(tonumber(ARGV[1]), count)
local many = math.min(tonumber(ARGV[2]), count - from)
if ARGV[3] == '1' then from = count - many end
local out = {head}
for i = from + 1, from + many do
    local turn = redis.call('HGET', KEYS[1], 't' .. string.format('%.0f', i))
    out[#out + 1] = struct.pack('<I8', i) .. (turn or '')
end
return out
