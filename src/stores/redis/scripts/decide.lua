-- Every operation on every state of a record: what core::decide says in C++, held to it by the contract suite and by small worlds.
-- `decide(operation, bytes, k, a)`: the record's bytes or false, KEYS[k] its name, ARGV[a] the terms.
local function make_decisions()
    local COMPLETED, FAILED, UNKNOWN, DEAD = 2, 3, 4, 5
    local RERUN, MESSAGE = 1, 2
    local IN_FLIGHT, NOT_DUE, REPLAY, MISMATCH, HELD, EXHAUSTED, FENCED, FOUND, DAMAGED = 1, 2, 3, 4, 5, 6, 9, 10, 11
    local HEADER = '<I8I8I8BBBBBBBBBBBBBxxxI4I4I4I4I4I8I8I8I4I4I8I8I8I4I4I4I4I4I4I4I4c16c16c32'
    local TERMS_FROM = 5  -- behind operation, keys more, arguments more
    local IDLE = 30 * 24 * 3600 * 1000000
    -- Who owns a record that a person decided about: nobody, also not who says so.
    local NO_OWNER, NO_NONCE = '\0\0', string.rep('\0', 16)

    -- The item.
    local k, a, terms
    -- The record: its fields as in core/record.hpp, and what follows the header, each part in the encoding of core/record_codec,
    -- which no script reads. `found` is nil if it is absent or expired; `found_token` is the expired one's too: the next
    -- token's lower bound.
    local found, found_token
    local r = {}

    local function reply(code, payload) return struct.pack('<BI8', code, now) .. payload end

    -- False: the bytes are no record.
    local function load(bytes)
        found, found_token = nil, 0
        if not bytes then return true end
        if #bytes < HEADER_BYTES or string.byte(bytes, 25) ~= 1 then return false end
        local _, n_canonical, n_fields, n_owner, n_label, n_failure, n_usage, n_turn, n_answer
        r.token, r.lease_end, r.created, _, r.status, r.final, r.cancelled, r.started, r.scheduled, r.letter, r.follows, r.kind, r.on_unknown,
        r.on_failed, r.has_turn, r.has_answer, r.attempt, r.uncharged, r.crashes, r.seconds, r.generation, r.due, r.completed, r.expires,
        r.max_attempts, r.max_crashes, r.keep_completed, r.keep_failed, r.keep_dead,
        n_canonical, n_fields, n_owner, n_label, n_failure, n_usage, n_turn, n_answer, r.nonce, r.tenant, r.raw =
            struct.unpack(HEADER, bytes)
        found_token = r.token
        if r.expires ~= 0 and r.expires <= now then return true end
        found = bytes
        local from = HEADER_BYTES + 1
        local function part(size)
            local value = string.sub(bytes, from, from + size - 1)
            from = from + size
            return value
        end
        r.canonical, r.fields, r.owner, r.label = part(n_canonical), part(n_fields), part(n_owner), part(n_label)
        r.failure, r.usage, r.turn, r.answer = part(n_failure), part(n_usage), part(n_turn), part(n_answer)
        return from == #bytes + 1
    end

    local function encode()
        return struct.pack(HEADER, r.token, r.lease_end, r.created, 1, r.status, r.final, r.cancelled, r.started, r.scheduled, r.letter, r.follows,
            r.kind, r.on_unknown, r.on_failed, r.has_turn, r.has_answer, r.attempt, r.uncharged, r.crashes, r.seconds, r.generation, r.due, r.completed,
            r.expires, r.max_attempts, r.max_crashes, r.keep_completed, r.keep_failed, r.keep_dead,
            #r.canonical, #r.fields, #r.owner, #r.label, #r.failure, #r.usage, #r.turn, #r.answer, r.nonce, r.tenant, r.raw) ..
            r.canonical .. r.fields .. r.owner .. r.label .. r.failure .. r.usage .. r.turn .. r.answer
    end

    -- Undecided records have no TTL and stand in their bucket's set by the end of their lease; the decided have one.
    local function write(bytes)
        if r.expires == 0 then
            redis.call('SET', KEYS[k], bytes)
            redis.call('ZADD', KEYS[k + 1], r.status == PROCESSING and r.lease_end or '+inf', KEYS[k])
        else
            redis.call('SET', KEYS[k], bytes, 'PX', math.max(1, math.ceil((r.expires - now) / 1000)))
            redis.call('ZREM', KEYS[k + 1], KEYS[k])
        end
    end

    local function applied()
        local bytes = encode()
        write(bytes)
        return reply(APPLIED, bytes)
    end
    local function unchanged() return reply(APPLIED, found) end
    local function fenced() return reply(FENCED, found or '') end

    -- Whose terms begin with a token and a nonce.
    local function owned()
        local op_token, op_nonce = struct.unpack('<I8c16', terms, TERMS_FROM)
        return found and r.token == op_token and r.nonce == op_nonce and op_nonce ~= NO_NONCE
    end

    -- Says of the current attempt, which ends with `new_status`, whether its call may have been processed. An attempt that ended
    -- in FAILED or DEAD is uncharged exactly if it may not.
    local function settle_attempt(new_status, may_be_processed)
        if (r.status == FAILED or r.status == DEAD) and r.started == 0 then r.uncharged = r.uncharged - 1 end
        r.status, r.started = new_status, may_be_processed
        if (r.status == FAILED or r.status == DEAD) and r.started == 0 then r.uncharged = r.uncharged + 1 end
    end

    local function expiry()
        if r.status == COMPLETED then return now + r.keep_completed * 1000 end
        if r.status == FAILED then
            if r.final == 1 then return now + r.keep_completed * 1000 end
            if r.kind == MESSAGE then return 0 end
            return now + r.keep_failed * 1000
        end
        if r.status == DEAD and (r.kind ~= MESSAGE or r.letter == 1) then return now + r.keep_dead * 1000 end
        return 0
    end

    local function failure_of(code, message) return string.char(#code) .. code .. string.char(#message) .. message .. '\0' end
    local function lost_lease() return failure_of('lease-lost', "the owner's lease ran out") end

    local function due_now()
        r.due = r.kind == MESSAGE and now or 0
        r.scheduled, r.lease_end = 0, 0
        r.expires = expiry()
    end

    local function become_completed()
        r.status, r.turn, r.has_turn, r.failure, r.due, r.scheduled, r.lease_end, r.completed = COMPLETED, '', 0, '', 0, 0, 0, now
        r.expires = expiry()
    end

    local function next_token() return math.max(found_token + 1, now) end

    -- A dead lease under a policy that forbids another call without a decision.
    local function held_by_policy() return r.started == 1 and r.on_unknown ~= RERUN end

    local function hold_unknown()
        settle_attempt(UNKNOWN, 1)
        r.failure, r.lease_end = lost_lease(), 0
        local bytes = encode()
        write(bytes)
        return bytes
    end

    -- A decision over an owner's head: a new token, and a nonce that nobody has.
    local function orphan() r.token, r.nonce, r.owner, r.lease_end = next_token(), NO_NONCE, NO_OWNER, 0 end

    -- FAILED and due with fresh budgets; `started` stays: the next attempt may pay again.
    local function begin_anew()
        r.status, r.uncharged, r.crashes, r.letter = FAILED, r.attempt, 0, 0
        due_now()
    end

    -- Appends a turn to a conversation, unless it holds one of this request: a hash of its head, its turns by number and the
    -- request ids that it holds.
    local function append(key, request_id, blob, late)
        local head = redis.call('HGET', key, 'h')
        local first, count = now, 0
        if head then
            local used
            first, used, count = struct.unpack('<I8I8I8', head)
            if used + IDLE <= now then
                redis.call('DEL', key)
                first, count = now, 0
            elseif redis.call('HEXISTS', key, 'i' .. request_id) == 1 then
                return
            end
        end
        count = count + 1
        redis.call('HSET', key, 'h', struct.pack('<I8I8I8', first, now, count), 't' .. count, struct.pack('<I8B', now, late) .. blob,
            'i' .. request_id, count)
        redis.call('PEXPIRE', key, IDLE / 1000)
    end

    local operations = {}

    -- Terms: not_after, lease in us, whether a takeover is charged as a crash. ARGV[a + 1] what the record is but for its times
    -- if this is the first grant: it carries what the caller asks with.
    operations[1] = function()
        local _, lease, charge_crash = struct.unpack('<I8I8B', terms, TERMS_FROM)
        local image = ARGV[a + 1]
        if not found then
            local next = next_token()
            redis.call('SET', KEYS[k], first_times(next, lease) .. image)
            redis.call('ZADD', KEYS[k + 1], now + lease, KEYS[k])
            return granted_first(next, lease)
        end
        local _, _, _, _, op_started, _, _, _, op_kind, op_on_unknown, op_on_failed, op_has_turn, _,
            _, _, _, _, _, _, _, _, op_max_attempts, op_max_crashes, op_keep_completed, op_keep_failed, op_keep_dead,
            op_n_canonical, op_n_fields, op_n_owner, op_n_label, _, _, op_n_turn, _, op_nonce, _, op_raw =
            struct.unpack('<' .. string.sub(HEADER, 8), image)
        local from = HEADER_BYTES - 24 + 1
        local function op_part(size)
            local value = string.sub(image, from, from + size - 1)
            from = from + size
            return value
        end
        local op_canonical = op_part(op_n_canonical)
        if r.raw ~= op_raw and (r.canonical == '' or r.canonical ~= op_canonical) then
            return reply(MISMATCH, struct.pack('<B', r.status) .. r.fields)
        end
        op_part(op_n_fields)
        local op_owner, op_label, op_turn = op_part(op_n_owner), op_part(op_n_label), op_part(op_n_turn)

        local function granted(how)
            return reply(GRANTED, struct.pack('<BI8I4I4I8BI8', how, r.token, r.attempt, r.generation, r.lease_end, r.follows, r.created))
        end
        local function take_policy()
            r.kind, r.on_unknown, r.on_failed = op_kind, op_on_unknown, op_on_failed
            r.max_attempts, r.max_crashes = op_max_attempts, op_max_crashes
            r.keep_completed, r.keep_failed, r.keep_dead = op_keep_completed, op_keep_failed, op_keep_dead
        end
        local function grant_again(how)
            r.follows = r.started
            if r.follows == 1 then r.seconds = r.seconds + 1 end
            r.due, r.scheduled, r.expires, r.letter, r.usage = 0, 0, 0, 0, ''
            r.status, r.token, r.nonce, r.owner = PROCESSING, next_token(), op_nonce, op_owner
            r.lease_end, r.started, r.turn, r.has_turn = now + lease, op_started, op_turn, op_has_turn
            take_policy()
            r.attempt = r.attempt + 1
            if op_label ~= '' then r.label = op_label end
            write(encode())
            return granted(how)
        end
        local function budget_used_up()
            return (op_max_attempts ~= 0 and r.attempt - r.uncharged >= op_max_attempts) or
                (op_max_crashes ~= 0 and r.crashes >= op_max_crashes)
        end
        local function exhaust()
            take_policy()
            r.due, r.scheduled, r.lease_end, r.status = 0, 0, 0, DEAD
            r.expires = expiry()
            local bytes = encode()
            write(bytes)
            return reply(EXHAUSTED, bytes)
        end

        if r.status == PROCESSING then
            if r.nonce == op_nonce then
                r.lease_end = now + lease
                write(encode())
                return granted(2)
            end
            if now < r.lease_end then
                return reply(IN_FLIGHT, struct.pack('<I8I8I8', r.token, math.ceil((r.lease_end - now) / 1000), r.created) .. r.owner)
            end
            if held_by_policy() then return reply(HELD, hold_unknown()) end
            settle_attempt(FAILED, r.started)
            r.failure = lost_lease()
            if charge_crash == 1 then r.crashes = r.crashes + 1 end
            if budget_used_up() then return exhaust() end
            return grant_again(4)
        end
        if r.status == FAILED then
            if r.final == 1 then return reply(REPLAY, found) end
            if r.kind == MESSAGE and now < r.due then
                return reply(NOT_DUE, struct.pack('<I8B', math.ceil((r.due - now) / 1000), r.scheduled))
            end
            if budget_used_up() then return exhaust() end
            return grant_again(3)
        end
        if r.status == COMPLETED then return reply(REPLAY, found) end
        if r.status == UNKNOWN then return reply(HELD, found) end
        return reply(EXHAUSTED, found)
    end

    -- start. Terms: token, nonce.
    operations[2] = function()
        if not owned() or r.status ~= PROCESSING then return fenced() end
        if r.started == 1 then return unchanged() end
        r.started = 1
        return applied()
    end

    -- renew. Terms: token, nonce, lease in us. Also after the lease's end, as long as nobody took over.
    operations[3] = function()
        if not owned() or r.status ~= PROCESSING then return fenced() end
        r.lease_end = now + struct.unpack('<I8', terms, TERMS_FROM + 24)
        return applied()
    end

    -- release. Terms: token (0: by the nonce alone), nonce.
    operations[4] = function()
        local op_token, op_nonce = struct.unpack('<I8c16', terms, TERMS_FROM)
        if not (found and r.nonce == op_nonce and op_nonce ~= NO_NONCE and (op_token == 0 or r.token == op_token)) then return fenced() end
        if r.status == FAILED and r.final == 0 then return unchanged() end
        if r.status ~= PROCESSING then return fenced() end
        settle_attempt(FAILED, 0)
        r.failure = failure_of('released', 'the grant was given back unused')
        due_now()
        return applied()
    end

    -- complete. Terms: token, nonce, keys more that are a conversation (0 or 1), the others are chunks of the answer.
    -- ARGV[a + 1] usage, [a + 2] answer; with a conversation [a + 3] request id, [a + 4] turn. The reply leaves the answer out:
    -- who asked has it.
    operations[5] = function()
        if not owned() then return fenced() end
        if r.status == COMPLETED then return unchanged() end
        if r.final == 1 then return fenced() end
        settle_attempt(COMPLETED, 1)
        become_completed()
        r.usage, r.answer, r.has_answer = ARGV[a + 1], ARGV[a + 2], 1
        write(encode())
        local _, more_keys = struct.unpack('<BI2', terms)
        local conversations = string.byte(terms, TERMS_FROM + 24)
        if conversations == 1 then append(KEYS[k + 2], ARGV[a + 3], ARGV[a + 4], 0) end
        local chunk_ttl = math.ceil((r.expires - now) / 1000) + 3600000  -- beyond the record's
        for i = k + 2 + conversations, k + 1 + more_keys do redis.call('PEXPIRE', KEYS[i], chunk_ttl) end
        r.answer, r.has_answer = '', 2
        return reply(APPLIED, encode())
    end

    -- fail. Terms: token, nonce, certainty, delay in us, whether a copy is scheduled, whether there is an answer.
    -- ARGV[a + 1] failure, [a + 2] usage, [a + 3] answer.
    operations[6] = function()
        local certainty, delay, op_scheduled, op_has_answer = struct.unpack('<BI8BB', terms, TERMS_FROM + 24)
        local MAY_BE_PROCESSED, REFUSED_FOR_GOOD = 2, 3
        if not owned() or r.status == COMPLETED then return fenced() end
        if r.final == 1 then
            if r.cancelled == 0 and certainty == REFUSED_FOR_GOOD then return unchanged() end
            return fenced()
        end
        local former_status, former_started, former_expires = r.status, r.started, r.expires
        if certainty == REFUSED_FOR_GOOD then
            settle_attempt(FAILED, 1)
            r.final, r.completed, r.turn, r.has_turn = 1, now, '', 0
            r.answer, r.has_answer = ARGV[a + 3], op_has_answer
        else
            local may = certainty == MAY_BE_PROCESSED and 1 or 0
            local new_status = FAILED
            if r.status == DEAD then
                new_status = DEAD
            elseif may == 1 and r.on_unknown ~= RERUN then
                new_status = UNKNOWN
            end
            settle_attempt(new_status, may)
            if former_status == r.status and r.failure == ARGV[a + 1] and former_started == r.started then return unchanged() end
        end
        local waits = r.status == FAILED and r.final == 0 and r.kind == MESSAGE
        r.due = waits and now + delay or 0
        r.scheduled = waits and op_scheduled or 0
        r.failure, r.usage, r.lease_end = ARGV[a + 1], ARGV[a + 2], 0
        if r.status == DEAD then r.expires = former_expires else r.expires = expiry() end
        return applied()
    end

    -- cancel. Terms: token, nonce. ARGV[a + 1] usage.
    operations[7] = function()
        if not owned() then return fenced() end
        if r.cancelled == 1 then return unchanged() end
        if r.status ~= PROCESSING and r.status ~= UNKNOWN then return fenced() end
        r.status, r.final, r.cancelled, r.completed, r.lease_end, r.turn, r.has_turn = FAILED, 1, 1, now, 0, '', 0
        r.failure, r.usage = failure_of('cancelled', 'cancelled on request'), ARGV[a + 1]
        r.expires = expiry()
        return applied()
    end

    -- resolve. Terms: token seen, decision, whether a turn is appended. ARGV[a + 1] answer, [a + 2] failure with the reason; with
    -- a turn KEYS[k + 2] the conversation, [a + 3] request id, [a + 4] turn (the caller took them from the record under the token).
    operations[8] = function()
        local token_seen, decision, appends = struct.unpack('<I8BB', terms, TERMS_FROM)
        local AS_COMPLETED, AS_FAILED = 1, 2
        if not found or r.token ~= token_seen or (r.status ~= UNKNOWN and r.status ~= DEAD) then return fenced() end
        local former_started = r.started
        orphan()
        if decision == AS_COMPLETED then
            r.answer, r.has_answer = ARGV[a + 1], 1
            become_completed()
            local done = applied()
            if appends == 1 then append(KEYS[k + 2], ARGV[a + 3], ARGV[a + 4], 1) end
            return done
        end
        r.failure = ARGV[a + 2]
        if decision == AS_FAILED then
            settle_attempt(FAILED, former_started)
            r.letter = 0
            due_now()
        else
            begin_anew()
        end
        return applied()
    end

    -- reopen. Terms: generation seen, raw digest. ARGV[a + 1] canonical digest, [a + 2] fields.
    operations[9] = function()
        local generation_seen, op_raw = struct.unpack('<I4c32', terms, TERMS_FROM)
        if not found then return fenced() end
        local op_canonical = ARGV[a + 1]
        local same = r.raw == op_raw or (r.canonical ~= '' and r.canonical == op_canonical)
        if r.generation == generation_seen + 1 and same then return unchanged() end
        if r.generation ~= generation_seen or (r.status ~= UNKNOWN and r.status ~= DEAD) then return fenced() end
        orphan()
        r.generation = r.generation + 1
        r.raw, r.canonical, r.fields, r.turn, r.has_turn = op_raw, op_canonical, ARGV[a + 2], '', 0
        r.failure = failure_of('reopened', 'begun anew by decision')
        begin_anew()
        return applied()
    end

    -- settle. Terms: token.
    operations[10] = function()
        local op_token = struct.unpack('<I8', terms, TERMS_FROM)
        if not (found and r.status == PROCESSING and r.token == op_token and r.lease_end <= now) then return reply(FOUND, found or '') end
        if held_by_policy() then return reply(APPLIED, hold_unknown()) end
        settle_attempt(FAILED, r.started)
        r.failure = lost_lease()
        due_now()
        return applied()
    end

    -- letter_published. Terms: token.
    operations[11] = function()
        local op_token = struct.unpack('<I8', terms, TERMS_FROM)
        if not found or r.status ~= DEAD or r.token ~= op_token then return fenced() end
        if r.letter == 1 then return unchanged() end
        r.letter = 1
        r.expires = expiry()
        return applied()
    end

    return function(operation, bytes, item_k, item_a)
        k, a, terms = item_k, item_a, ARGV[item_a]
        if not load(bytes) then return reply(DAMAGED, '') end
        return operations[operation]()
    end
end

local decisions
local function decide(operation, bytes, k, a)
    decisions = decisions or make_decisions()
    return decisions(operation, bytes, k, a)
end
