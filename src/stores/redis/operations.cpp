#include "stores/redis/operations.hpp"

#include <algorithm>
#include <charconv>

#include "base/assert.hpp"
#include "core/record_codec.hpp"
#include "stores/redis/scripts.hpp"

namespace semel::stores::redis {

namespace {

using namespace core;

/// Codes of the script's answers: scripts/batch.lua.
enum class Code : std::uint8_t {
    granted,
    in_flight,
    not_due,
    replay,
    mismatch,
    held,
    exhausted,
    late,
    applied,
    fenced,
    found,
    damaged
};

/// Chunks whose record is never completed go after this time; complete gives the others their
/// record's life and an hour.
constexpr std::chrono::milliseconds orphaned_chunk_life = std::chrono::hours{24};

std::uint64_t micros(milliseconds d) {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::microseconds>(d).count());
}

template <class Bytes>
void put_raw(std::string& out, const Bytes& bytes) {
    out.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::string fence_bytes(const Nonce& fence) {
    return {reinterpret_cast<const char*>(fence.bytes.data()), fence.bytes.size()};
}

template <class Part>
std::string bytes_of(const Part& part, bool present) {
    std::string out;
    if (present) core::encode_part(part, out);
    return out;
}
std::string usage_bytes(const Usage& usage) { return bytes_of(usage, usage != Usage{}); }
std::string failure_bytes(const Failure& failure) {
    return bytes_of(failure, failure != Failure{});
}

/// Puts a command together: keys first, then arguments.
class Builder {
  public:
    Builder(const Script* script, std::uint16_t slot) {
        command_.script = script;
        command_.slot = slot;
    }
    Builder& word(std::string_view text) {
        append_argument(command_.wire, text);
        ++command_.arguments;
        return *this;
    }
    Builder& reads() {
        command_.writes = false;
        return *this;
    }
    Builder& repeatable() {
        command_.repeatable = true;
        return *this;
    }
    Command take() { return std::move(command_); }

  private:
    Command command_;
};

void add_word(Command& command, std::string_view text) {
    append_argument(command.wire, text);
    ++command.arguments;
}
void add_message(Command& command, const Park& park) {
    add_word(command, place_name(park.place));
    add_word(command, park.bytes);
}
void add_message(Command& command, const Unpark& unpark) {
    add_word(command, place_name(unpark.place));
}

/// Plain commands.
class Asking {
  public:
    Asking(const StoredKey& key, const Names& names)
        : key_(key), names_(names), slot_(names.slot(bucket_of(key))) {}

    template <class Op>
    Command operator()(const Op&) const {
        SEMEL_ASSERT(false, "operations on records are decided by the script");
    }
    Command operator()(const Get&) const { return get_record(key_, names_); }

    Command operator()(const PutChunk& op) const {
        return Builder(nullptr, slot_)
            .word("SET")
            .word(names_.chunk(key_, op.token, op.n))
            .word(op.bytes)
            .word("NX")
            .word("PX")
            .word(std::to_string(orphaned_chunk_life.count()))
            .repeatable()
            .take();
    }
    Command operator()(const GetChunk& op) const { return get(names_.chunk(key_, op.token, op.n)); }
    Command operator()(const GetConversation& op) const {
        return Builder(nullptr, slot_)
            .word("HMGET")
            .word(names_.conversation(key_))
            .word("h")
            .word("i" + op.request_id)
            .reads()
            .repeatable()
            .take();
    }
    Command operator()(const GetTurns& op) const {
        // Numbers are exact in Lua up to 2^53; beyond it there is no turn.
        const std::uint64_t after = std::min(op.after, std::uint64_t{1} << 53);
        return Builder(&scripts().turns, slot_)
            .word("1")
            .word(names_.conversation(key_))
            .word(std::to_string(after))
            .word(std::to_string(op.limit))
            .word(op.newest ? "1" : "0")
            .reads()
            .repeatable()
            .take();
    }
    Command operator()(const DeleteConversation&) const {
        return Builder(nullptr, slot_)
            .word("DEL")
            .word(names_.conversation(key_))
            .repeatable()
            .take();
    }
    Command operator()(const ClaimValue& op) const {
        return Builder(nullptr, names_.value_slot())
            .word("SET")
            .word(names_.value(op.name))
            .word(op.value_if_absent)
            .word("NX")
            .word("GET")
            .repeatable()
            .take();
    }
    Command operator()(const ReplaceValue& op) const {
        return Builder(nullptr, names_.value_slot())
            .word("SET")
            .word(names_.value(op.name))
            .word(op.value)
            .repeatable()
            .take();
    }
    Command operator()(const OpenParking&) const {
        SEMEL_ASSERT(false, "a list is taken over from who was seen in it: open_parking()");
    }
    /// Not repeatable: a copy that comes late would put back what was taken out meanwhile. Who gets
    /// no answer may shut it out with a new fence.
    Command operator()(const Park& op) const {
        Command command = on_list(scripts().park).word(fence_bytes(op.fence)).take();
        add_message(command, op);
        return command;
    }
    /// A place is not used again before its message has been delivered again.
    Command operator()(const Unpark& op) const {
        Command command = on_list(scripts().unpark).repeatable().take();
        add_message(command, op);
        return command;
    }
    Command operator()(const GetParked& op) const {
        return on_list(scripts().parked)
            .word(place_name(op.from))
            .word(std::to_string(op.limit))
            .reads()
            .repeatable()
            .take();
    }

    Command get(std::string_view name) const {
        return Builder(nullptr, slot_).word("GET").word(name).reads().repeatable().take();
    }

  private:
    /// A script that is given a list of parked messages.
    [[nodiscard]] Builder on_list(const Script& script) const {
        Builder out(&script, slot_);
        out.word("2").word(names_.parking(key_)).word(names_.places(key_));
        return out;
    }

    const StoredKey& key_;
    const Names& names_;
    std::uint16_t slot_;
};

base::Error unreadable(const char* what) {
    return {.code = base::ErrorCode::store_corrupt,
            .applied = base::Applied::unknown,
            .detail = std::string("redis: a reply cannot be read (") + what +
                      "); is another program writing to this server under the same prefix?"};
}

base::Result<RecordPtr> record_in(std::string_view bytes, const Item& item) {
    if (bytes.empty()) return RecordPtr{};
    bool answer_elsewhere = false;
    auto record = decode(bytes, &answer_elsewhere);
    if (!record) return record.error();
    if (answer_elsewhere) {
        if (const auto* complete = std::get_if<Complete>(&item.operation))
            record->answer = complete->answer;
    }
    return std::make_shared<const Record>(std::move(*record));
}

/// A script's string for an item: code, time, and what belongs to the code.
base::Result<Decided> decode_decided(const Item& item, std::string_view bytes) {
    Cursor in(bytes);
    const auto code = static_cast<Code>(in.u8());
    const StoreTime at{static_cast<std::int64_t>(in.u64())};
    if (!in.ok()) return unreadable("a script's");
    const auto with_record = [&](auto wrap) -> base::Result<Decided> {
        auto record = record_in(in.rest(), item);
        if (!record) return record.error();
        return Decided{wrap(std::move(*record)), at};
    };
    switch (code) {
        case Code::granted: {
            Granted granted;
            granted.kind = static_cast<Granted::Kind>(in.u8());
            granted.token.value = in.u64();
            granted.attempt = in.u32();
            granted.generation = in.u32();
            granted.lease_end.us = static_cast<std::int64_t>(in.u64());
            granted.possible_second_payment = in.u8() != 0;
            granted.created.us = static_cast<std::int64_t>(in.u64());
            if (!in.ok() || !in.at_end()) return unreadable("a grant");
            return Decided{granted, at};
        }
        case Code::in_flight: {
            InFlight running;
            running.token.value = in.u64();
            running.remaining = milliseconds{static_cast<std::int64_t>(in.u64())};
            running.created.us = static_cast<std::int64_t>(in.u64());
            const std::string_view owner = in.rest();
            if (!in.ok()) return unreadable("who owns it");
            if (!owner.empty()) {
                if (auto read = decode_part(owner, running.owner); !read) return read.error();
            }
            return Decided{std::move(running), at};
        }
        case Code::not_due: {
            NotDue waits;
            waits.remaining = milliseconds{static_cast<std::int64_t>(in.u64())};
            waits.scheduled_copy = in.u8() != 0;
            if (!in.ok()) return unreadable("when it is due");
            return Decided{waits, at};
        }
        case Code::mismatch: {
            const auto status = static_cast<Status>(in.u8());
            const std::string_view bytes_of_fields = in.rest();
            Fingerprint stored;
            if (!bytes_of_fields.empty()) {
                if (auto read = decode_part(bytes_of_fields, stored.fields); !read)
                    return read.error();
            }
            const auto* acquire = std::get_if<Acquire>(&item.operation);
            if (!in.ok() || acquire == nullptr) return unreadable("a mismatch");
            return Decided{Mismatch{differing_fields(stored, acquire->fingerprint), status}, at};
        }
        case Code::replay:
            return with_record([](RecordPtr record) { return Replay{std::move(record)}; });
        case Code::held:
            return with_record([](RecordPtr record) { return UnknownOutcome{std::move(record)}; });
        case Code::exhausted:
            return with_record([](RecordPtr record) { return Exhausted{std::move(record)}; });
        case Code::late:
            return Decided{Late{}, at};
        case Code::applied:
            return with_record([](RecordPtr record) { return Applied{std::move(record)}; });
        case Code::fenced:
            return with_record([](RecordPtr record) { return Fenced{std::move(record)}; });
        case Code::found:
            return with_record([](RecordPtr record) { return Found{std::move(record)}; });
        case Code::damaged:
            return base::Error{.code = base::ErrorCode::store_corrupt,
                               .detail =
                                   "redis: the record is damaged or of another layout than this "
                                   "version knows; remove it, or start "
                                   "the version that wrote it"};
    }
    return unreadable("an unknown code");
}

bool gone(const Conversation& conversation, StoreTime at) {
    return conversation.last_used + conversation_idle_retention <= at;
}

base::Result<Conversation> conversation_of(const std::string& head) {
    Cursor in(head);
    Conversation conversation;
    conversation.created.us = static_cast<std::int64_t>(in.u64());
    conversation.last_used.us = static_cast<std::int64_t>(in.u64());
    conversation.turns = in.u64();
    if (!in.ok() || !in.at_end()) return unreadable("a conversation's head");
    return conversation;
}

/// What replies to plain commands mean.
class Reading {
  public:
    Reading(const Reply& reply, StoreTime at) : reply_(reply), at_(at) {}

    template <class Op>
    base::Result<StoreOutcome> operator()(const Op&) const {
        return unreadable("an operation's");
    }
    base::Result<StoreOutcome> operator()(const Get&) const {
        auto record = record_of(reply_);
        if (!record) return record.error();
        const bool expired = *record && (*record)->expires.us != 0 && (*record)->expires <= at_;
        return StoreOutcome{Found{expired ? nullptr : std::move(*record)}};
    }
    base::Result<StoreOutcome> operator()(const PutChunk&) const {
        // Nil: it is there already, and stays.
        return StoreOutcome{ChunkStored{}};
    }
    base::Result<StoreOutcome> operator()(const GetChunk&) const {
        if (reply_.kind == Reply::Kind::nil) return StoreOutcome{ChunkMissing{}};
        return StoreOutcome{ChunkFound{reply_.text}};
    }
    base::Result<StoreOutcome> operator()(const GetConversation& op) const {
        if (reply_.elements.size() != 2) return unreadable("a conversation's");
        if (reply_.elements[0].kind != Reply::Kind::string)
            return StoreOutcome{ConversationMissing{}};
        auto conversation = conversation_of(reply_.elements[0].text);
        if (!conversation) return conversation.error();
        if (gone(*conversation, at_)) return StoreOutcome{ConversationMissing{}};
        const bool holds = !op.request_id.empty() && reply_.elements[1].kind == Reply::Kind::string;
        return StoreOutcome{ConversationFound{*conversation, holds}};
    }
    base::Result<StoreOutcome> operator()(const GetTurns&) const {
        TurnsFound found;
        if (reply_.kind != Reply::Kind::array) return unreadable("a conversation's turns");
        if (reply_.elements.empty()) return StoreOutcome{std::move(found)};
        auto conversation = conversation_of(reply_.elements[0].text);
        if (!conversation) return conversation.error();
        if (gone(*conversation, at_)) return StoreOutcome{std::move(found)};
        for (std::size_t i = 1; i < reply_.elements.size(); ++i) {
            auto turn = decode_turn(reply_.elements[i].text);
            if (!turn) return turn.error();
            found.turns.push_back(std::move(*turn));
        }
        return StoreOutcome{std::move(found)};
    }
    base::Result<StoreOutcome> operator()(const DeleteConversation&) const {
        return StoreOutcome{ConversationDeleted{reply_.integer != 0}};
    }
    base::Result<StoreOutcome> operator()(const ClaimValue& op) const {
        return StoreOutcome{
            Value{reply_.kind == Reply::Kind::nil ? op.value_if_absent : reply_.text}};
    }
    base::Result<StoreOutcome> operator()(const ReplaceValue& op) const {
        return StoreOutcome{Value{op.value}};
    }
    base::Result<StoreOutcome> operator()(const Park&) const {
        if (reply_.kind != Reply::Kind::integer) return unreadable("of parking");
        if (reply_.integer == 0) return StoreOutcome{ParkingLost{}};
        return StoreOutcome{Parked{}};
    }
    base::Result<StoreOutcome> operator()(const Unpark&) const { return StoreOutcome{Unparked{}}; }
    base::Result<StoreOutcome> operator()(const GetParked&) const {
        ParkedFound found;
        const std::vector<Reply>& told = reply_.elements;
        if (reply_.kind != Reply::Kind::array || told.size() % 2 != 0)
            return unreadable("of parked messages");
        found.messages.reserve(told.size() / 2);
        for (std::size_t i = 0; i < told.size(); i += 2) {
            const auto place = place_in(told[i].text);
            if (!place) return place.error();
            if (told[i + 1].kind != Reply::Kind::string) return unreadable("a parked message's");
            found.messages.push_back({.place = *place, .bytes = told[i + 1].text});
        }
        return StoreOutcome{std::move(found)};
    }

  private:
    const Reply& reply_;
    StoreTime at_;
};

}  // namespace

// -------------------------------------------------------------------- the script that decides

/// Adds one item: its two keys, its terms, and what belongs to them.
class ScriptBatch::Adding {
  public:
    Adding(ScriptBatch& batch, const StoredKey& key, const RecordPtr& seen)
        : batch_(batch), key_(key), seen_(seen) {}

    void operator()(const Acquire& op) {
        Record fresh;
        fresh.status = Status::processing;
        fresh.fingerprint = op.fingerprint;
        fresh.attempt = 1;
        fresh.nonce = op.nonce;
        fresh.owner = op.owner;
        fresh.call_started = op.starts_call;
        fresh.policy = op.policy;
        fresh.label = op.label;
        fresh.tenant = op.tenant;
        fresh.turn = op.turn;
        std::string image;
        encode(fresh, image);
        put64(terms_, static_cast<std::uint64_t>(std::max<std::int64_t>(op.not_after.us, 0)));
        put64(terms_, micros(op.lease));
        put8(terms_, op.charge_crash ? 1 : 0);
        argument(std::string_view(image).substr(record_times_bytes));
        finish(OperationCode::acquire);
    }
    void operator()(const Start& op) { by_owner(OperationCode::start, op.token, op.nonce); }
    void operator()(const Renew& op) {
        owner(op.token, op.nonce);
        put64(terms_, micros(op.lease));
        finish(OperationCode::renew);
    }
    void operator()(const Release& op) { by_owner(OperationCode::release, op.token, op.nonce); }
    void operator()(const Complete& op) {
        owner(op.token, op.nonce);
        const std::string said = op.append ? fitting_turn(*op.append) : std::string{};
        put8(terms_, said.empty() ? 0 : 1);
        if (!said.empty()) key(batch_.names_.conversation(op.append->conversation));
        const std::uint32_t chunks =
            op.answer.body_kind == BodyKind::chunks ? op.answer.chunk_count : 0;
        for (std::uint32_t n = 0; n < chunks; ++n) key(batch_.names_.chunk(key_, op.token, n));
        argument(usage_bytes(op.usage));
        argument(bytes_of(op.answer, true));
        if (!said.empty()) turn(op.append->request_id, said);
        finish(OperationCode::complete);
    }
    void operator()(const Fail& op) {
        owner(op.token, op.nonce);
        put8(terms_, static_cast<std::uint8_t>(op.certainty));
        put64(terms_, micros(op.delay));
        put8(terms_, op.scheduled_copy ? 1 : 0);
        put8(terms_, op.answer ? 1 : 0);
        argument(failure_bytes(op.failure));
        argument(usage_bytes(op.usage));
        argument(op.answer ? bytes_of(*op.answer, true) : std::string{});
        finish(OperationCode::fail);
    }
    void operator()(const Cancel& op) {
        owner(op.token, op.nonce);
        argument(usage_bytes(op.usage));
        finish(OperationCode::cancel);
    }
    void operator()(const Resolve& op) {
        put64(terms_, op.token_seen.value);
        put8(terms_, static_cast<std::uint8_t>(op.decision));
        std::string said;
        if (op.decision == Resolve::Decision::completed && op.answer_content && seen_ &&
            seen_->turn && seen_->token == op.token_seen) {
            Append whole = *seen_->turn;
            whole.answer_content = *op.answer_content;
            said = fitting_turn(whole);
        }
        put8(terms_, said.empty() ? 0 : 1);
        // Decided without an answer at hand: duplicates are told that it is not kept.
        argument(
            bytes_of(op.answer ? *op.answer : core::Answer{.body_kind = BodyKind::not_kept}, true));
        argument(failure_bytes({"resolved", op.reason, 0}));
        if (!said.empty()) {
            key(batch_.names_.conversation(seen_->turn->conversation));
            turn(seen_->turn->request_id, said);
        }
        finish(OperationCode::resolve);
    }
    void operator()(const Reopen& op) {
        put32(terms_, op.generation_seen);
        put_raw(terms_, op.fingerprint.raw.bytes);
        argument(op.fingerprint.canonical.empty() ? std::string_view{}
                                                  : op.fingerprint.canonical.view());
        argument(bytes_of(op.fingerprint.fields, !op.fingerprint.fields.empty()));
        finish(OperationCode::reopen);
    }
    void operator()(const Settle& op) { by_token(OperationCode::settle, op.token); }
    void operator()(const LetterPublished& op) {
        by_token(OperationCode::letter_published, op.token);
    }
    template <class Op>
    void operator()(const Op&) {
        SEMEL_ASSERT(false, "plain commands are not decided by the script");
    }

  private:
    void key(std::string_view name) {
        append_argument(more_keys_, name);
        ++more_key_count_;
    }
    void argument(std::string_view bytes) {
        append_argument(more_arguments_, bytes);
        ++more_argument_count_;
    }
    void owner(FencingToken token, const Nonce& nonce) {
        put64(terms_, token.value);
        put_raw(terms_, nonce.bytes);
    }
    /// Empty: the server does not take a turn of this size.
    [[nodiscard]] std::string fitting_turn(const Append& said) const {
        std::string encoded = encode_turn(said);
        if (encoded.size() > batch_.argument_max_bytes_) encoded.clear();
        return encoded;
    }
    void turn(std::string_view request_id, std::string_view encoded) {
        argument(request_id);
        argument(encoded);
    }
    void by_owner(OperationCode code, FencingToken token, const Nonce& nonce) {
        owner(token, nonce);
        finish(code);
    }
    void by_token(OperationCode code, FencingToken token) {
        put64(terms_, token.value);
        finish(code);
    }
    void finish(OperationCode code) {
        append_argument(batch_.keys_, batch_.names_.record(key_));
        append_argument(batch_.keys_, batch_.names_.undecided(bucket_of(key_)));
        batch_.keys_ += more_keys_;
        batch_.key_count_ += 2 + more_key_count_;
        std::string head;
        put8(head, static_cast<std::uint8_t>(code));
        put8(head, static_cast<std::uint8_t>(more_key_count_ & 0xff));
        put8(head, static_cast<std::uint8_t>(more_key_count_ >> 8));
        put8(head, more_argument_count_);
        append_argument(batch_.arguments_, head + terms_);
        batch_.arguments_ += more_arguments_;
        batch_.argument_count_ += 1U + more_argument_count_;
        ++batch_.items_;
    }

    ScriptBatch& batch_;
    const StoredKey& key_;
    const RecordPtr& seen_;
    std::string terms_;
    std::string more_keys_;
    std::string more_arguments_;
    std::uint32_t more_key_count_ = 0;
    std::uint8_t more_argument_count_ = 0;
};

void ScriptBatch::add(const Item& item, const RecordPtr& seen) {
    std::visit(Adding(*this, item.key, seen), item.operation);
}

Command ScriptBatch::take(std::string_view time, bool repeatable) {
    Command command;
    command.script = &scripts().batch;
    command.slot = slot_;
    command.repeatable = repeatable;
    command.wire.reserve(bytes() + 64);
    append_argument(command.wire, std::to_string(key_count_));
    command.wire += keys_;
    append_argument(command.wire, time);
    command.wire += arguments_;
    command.arguments = 2 + key_count_ + argument_count_;
    return command;
}

bool decided_by_script(const StoreOperation& operation) {
    return std::visit(
        [](const auto& op) {
            using Op = std::remove_cvref_t<decltype(op)>;
            return std::is_constructible_v<Operation, Op> && !std::is_same_v<Op, Get>;
        },
        operation);
}

base::Result<Decided> decided(const Item& item, const Reply& reply) {
    if (reply.kind != Reply::Kind::string) return unreadable("a script's");
    return decode_decided(item, reply.text);
}

// -------------------------------------------------------------------- plain commands

Command command_of(const Item& item, const Names& names) {
    return std::visit(Asking(item.key, names), item.operation);
}

void add_to_parking(Command& command, const StoreOperation& operation) {
    if (const auto* park = std::get_if<Park>(&operation)) {
        add_message(command, *park);
    } else {
        add_message(command, std::get<Unpark>(operation));
    }
}

Command get_fence(const StoredKey& list, const Names& names) {
    return Builder(nullptr, names.slot(bucket_of(list)))
        .word("HGET")
        .word(names.parking(list))
        .word("f")
        .reads()
        .repeatable()
        .take();
}

base::Result<std::string> fence_of(const Reply& reply) {
    if (reply.kind == Reply::Kind::nil) return std::string{};
    if (reply.kind != Reply::Kind::string) return unreadable("a list's owner");
    return reply.text;
}

Command open_parking(const StoredKey& list, const OpenParking& operation, std::string_view seen,
                     const Names& names) {
    return Builder(&scripts().parking_open, names.slot(bucket_of(list)))
        .word("1")
        .word(names.parking(list))
        .word(seen)
        .word(fence_bytes(operation.fence))
        .repeatable()
        .take();
}

base::Result<bool> parking_opened(const Reply& reply) {
    if (reply.kind != Reply::Kind::integer) return unreadable("of a take-over");
    return reply.integer != 0;
}

Command get_record(const StoredKey& key, const Names& names) {
    return Builder(nullptr, names.slot(bucket_of(key)))
        .word("GET")
        .word(names.record(key))
        .reads()
        .repeatable()
        .take();
}

Command get_value(std::string_view name, const Names& names) {
    return Builder(nullptr, names.value_slot())
        .word("GET")
        .word(names.value(name))
        .reads()
        .repeatable()
        .take();
}

base::Result<Decided> outcome_of(const Item& item, const Reply& reply, StoreTime read_at) {
    auto outcome = std::visit(Reading(reply, read_at), item.operation);
    if (!outcome) return outcome.error();
    return Decided{std::move(*outcome), read_at};
}

base::Result<StoreTime> time_in(const Reply& reply) {
    const auto number = [&reply](std::size_t i, std::int64_t& value) {
        if (reply.elements.size() <= i) return false;
        const std::string& text = reply.elements[i].text;
        const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
        return read.ec == std::errc{} && read.ptr == text.data() + text.size();
    };
    std::int64_t seconds = 0;
    std::int64_t micros_of_second = 0;
    if (!number(0, seconds) || !number(1, micros_of_second)) return unreadable("the time");
    return StoreTime{seconds * 1'000'000 + micros_of_second};
}

base::Result<RecordPtr> record_of(const Reply& reply) {
    if (reply.kind == Reply::Kind::nil) return RecordPtr{};
    if (reply.kind != Reply::Kind::string) return unreadable("a record's");
    auto record = decode(reply.text);
    if (!record) return record.error();
    return std::make_shared<const Record>(std::move(*record));
}

}  // namespace semel::stores::redis
