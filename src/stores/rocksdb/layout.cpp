#include "stores/rocksdb/layout.hpp"

#include <algorithm>

#include "base/assert.hpp"

namespace semel::stores::layout {
namespace {

void put_u32(std::string& out, std::uint32_t value) {
    for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>((value >> shift) & 0xFFU);
}

std::uint32_t get_u32(std::string_view bytes) {
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < 4; ++i) value = (value << 8) | static_cast<unsigned char>(bytes[i]);
    return value;
}

std::string with_prefix(char prefix, const core::StoredKey& key, std::string_view rest = {}) {
    std::string out;
    out.reserve(1 + key.bytes.size() + rest.size());
    out += prefix;
    out += key.view();
    out += rest;
    return out;
}

}  // namespace

void put_u64(std::string& out, std::uint64_t value) {
    for (int shift = 56; shift >= 0; shift -= 8) out += static_cast<char>((value >> shift) & 0xFFU);
}

std::uint64_t get_u64(std::string_view eight_bytes) {
    SEMEL_ASSERT(eight_bytes.size() >= 8, "callers check the length of what they read");
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < 8; ++i) value = (value << 8) | static_cast<unsigned char>(eight_bytes[i]);
    return value;
}

std::optional<core::StoredKey> stored_key(std::string_view bytes) {
    core::StoredKey key;
    if (bytes.size() != key.bytes.size()) return std::nullopt;
    std::copy(bytes.begin(), bytes.end(), key.bytes.begin());
    return key;
}

std::string encode(const AnswerKey& key) {
    std::string out;
    out.reserve(answer_key_bytes);
    put_u64(out, static_cast<std::uint64_t>(key.expires.us));
    put_u64(out, key.number);
    return out;
}

std::optional<AnswerKey> decode_answer_key(std::string_view bytes) {
    if (bytes.size() != answer_key_bytes) return std::nullopt;
    return AnswerKey{{static_cast<std::int64_t>(get_u64(bytes))}, get_u64(bytes.substr(8))};
}

std::string claims_key(std::uint64_t number) {
    std::string out;
    put_u64(out, number);
    return out;
}

void put_claim(std::string& into, const core::StoredKey& key, std::string_view record) {
    into += key.view();
    put_u32(into, static_cast<std::uint32_t>(record.size()));
    into += record;
}

std::size_t claim_size(const char* claim) { return get_u32(std::string_view(claim, claim_head_bytes).substr(claim_head_bytes - 4)); }

std::optional<Claim> take_claim(std::string_view& bytes) {
    constexpr std::size_t key_bytes = sizeof(core::StoredKey::bytes);
    if (bytes.size() < key_bytes + 4) return std::nullopt;
    const std::size_t size = get_u32(bytes.substr(key_bytes));
    if (bytes.size() - key_bytes - 4 < size) return std::nullopt;
    const Claim claim{*stored_key(bytes.substr(0, key_bytes)), bytes.substr(key_bytes + 4, size)};
    bytes.remove_prefix(key_bytes + 4 + size);
    return claim;
}

std::string chunk_prefix(const core::StoredKey& key, core::FencingToken token) {
    std::string out(key.view());
    put_u64(out, token.value);
    return out;
}

std::string chunk_key(const core::StoredKey& key, core::FencingToken token, std::uint32_t n) {
    std::string out = chunk_prefix(key, token);
    put_u32(out, n);
    return out;
}

std::optional<ChunkName> decode_chunk_key(std::string_view bytes) {
    constexpr std::size_t key_bytes = sizeof(core::StoredKey::bytes);
    if (bytes.size() != key_bytes + 8 + 4) return std::nullopt;
    return ChunkName{*stored_key(bytes.substr(0, key_bytes)), {get_u64(bytes.substr(key_bytes))},
                     get_u32(bytes.substr(key_bytes + 8))};
}

std::string head_key(const core::StoredKey& conversation) { return with_prefix(head_prefix, conversation); }

std::string fence_key(const core::StoredKey& list) { return with_prefix('f', list); }

std::string parked_prefix(const core::StoredKey& list) { return with_prefix('m', list); }

std::string parked_key(const core::StoredKey& list, std::uint64_t place) {
    std::string out = parked_prefix(list);
    put_u64(out, place);
    return out;
}

std::string turn_prefix(const core::StoredKey& conversation) { return with_prefix('t', conversation); }

std::string turn_key(const core::StoredKey& conversation, std::uint64_t number) {
    std::string out = turn_prefix(conversation);
    put_u64(out, number);
    return out;
}

std::string id_prefix(const core::StoredKey& conversation) { return with_prefix('i', conversation); }

std::string id_key(const core::StoredKey& conversation, std::string_view request_id) {
    return with_prefix('i', conversation, request_id);
}

std::string encode(const core::Conversation& head) {
    std::string out;
    put_u64(out, static_cast<std::uint64_t>(head.created.us));
    put_u64(out, static_cast<std::uint64_t>(head.last_used.us));
    put_u64(out, head.turns);
    return out;
}

std::optional<core::Conversation> decode_conversation(std::string_view bytes) {
    if (bytes.size() != 24) return std::nullopt;
    core::Conversation head;
    head.created.us = static_cast<std::int64_t>(get_u64(bytes));
    head.last_used.us = static_cast<std::int64_t>(get_u64(bytes.substr(8)));
    head.turns = get_u64(bytes.substr(16));
    return head;
}

std::string encode(const core::Turn& turn) {
    std::string out;
    out.reserve(8 + 1 + 8 + turn.request_id.size() + turn.user_content.size() + turn.answer_content.size());
    put_u64(out, static_cast<std::uint64_t>(turn.at.us));
    out += turn.late ? '\1' : '\0';
    put_u32(out, static_cast<std::uint32_t>(turn.request_id.size()));
    put_u32(out, static_cast<std::uint32_t>(turn.user_content.size()));
    out += turn.request_id;
    out += turn.user_content;
    out += turn.answer_content;
    return out;
}

std::optional<core::Turn> decode_turn(std::uint64_t number, std::string_view bytes) {
    constexpr std::size_t fixed = 8 + 1 + 4 + 4;
    if (bytes.size() < fixed) return std::nullopt;
    const std::size_t id_bytes = get_u32(bytes.substr(9));
    const std::size_t user_bytes = get_u32(bytes.substr(13));
    if (bytes.size() - fixed < id_bytes || bytes.size() - fixed - id_bytes < user_bytes) return std::nullopt;
    core::Turn turn;
    turn.number = number;
    turn.at.us = static_cast<std::int64_t>(get_u64(bytes));
    turn.late = bytes[8] != '\0';
    turn.request_id = bytes.substr(fixed, id_bytes);
    turn.user_content = bytes.substr(fixed + id_bytes, user_bytes);
    turn.answer_content = bytes.substr(fixed + id_bytes + user_bytes);
    return turn;
}

std::string value_key(std::string_view name) {
    std::string out = "value:";
    out += name;
    return out;
}

}  // namespace semel::stores::layout
