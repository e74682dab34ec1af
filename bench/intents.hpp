// The intents that all stores are measured with: a request like a gateway's, an answer of 1 KiB.
#pragma once

#include <cstring>
#include <memory>
#include <string>

#include "base/hash.hpp"
#include "core/store.hpp"

namespace bench {

using namespace semel;        // NOLINT: a measuring program
using namespace semel::core;  // NOLINT

constexpr std::size_t body_bytes = 1024;

/// Cheap, since the reference's keys are: 32 bytes by SplitMix64.
inline StoredKey key_of(std::uint64_t n) {
    StoredKey key;
    for (std::size_t i = 0; i < key.bytes.size(); i += sizeof n) {
        std::uint64_t z = n * 4 + i + 0x9E3779B97F4A7C15U;
        z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
        z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
        z ^= z >> 31U;
        std::memcpy(key.bytes.data() + i, &z, sizeof z);
    }
    return key;
}

inline Nonce nonce_of(std::uint64_t n) {
    Nonce nonce;
    ++n;  // the empty one is nobody's
    std::memcpy(nonce.bytes.data(), &n, sizeof n);
    return nonce;
}

inline Acquire acquire_of(std::uint64_t n) {
    Acquire op;
    op.fingerprint.raw = key_of(n ^ (std::uint64_t{1} << 62U));
    op.fingerprint.canonical = key_of(n ^ (std::uint64_t{1} << 61U));
    for (std::uint64_t i = 0; i < 4; ++i) op.fingerprint.fields.push_back({i, n * i});
    op.owner.id = "0123456789abcdef";
    op.nonce = nonce_of(n);
    op.not_after.us = std::int64_t{1} << 52;
    op.starts_call = true;
    op.label = "chat";
    return op;
}

inline const Answer& answer() {
    static const Answer made = [] {
        std::string body;
        for (std::uint64_t i = 0; body.size() < body_bytes; ++i)
            body += base::hex(key_of(i).view());
        body.resize(body_bytes);
        Answer out;
        out.http_status = 200;
        out.content_type = "application/json";
        out.headers = {{"x-request-id", "req_0123456789abcdef"}, {"openai-processing-ms", "812"}};
        out.body = std::make_shared<const std::string>(body);
        out.body_bytes = body.size();
        out.body_digest = base::sha256(body);
        return out;
    }();
    return made;
}

inline Complete complete_of(FencingToken token, const Nonce& nonce) {
    return {.token = token,
            .nonce = nonce,
            .answer = answer(),
            .usage = {.model = "gpt-4o-mini",
                      .input_tokens = 120,
                      .output_tokens = 200,
                      .upstream_ids = {}},
            .append = std::nullopt};
}

}  // namespace bench
