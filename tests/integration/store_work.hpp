// Intents by number, for tests that ask a store many things and look later whether all of it is
// there.
#pragma once

#include <cstring>
#include <future>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/hash.hpp"
#include "core/store.hpp"

namespace semel::integration {

inline core::StoredKey key_of(std::uint64_t n) {
    return base::sha256("intent " + std::to_string(n));
}

/// Never the empty one, which names nobody.
inline core::Nonce nonce_of(std::uint64_t n) {
    core::Nonce nonce;
    std::memcpy(nonce.bytes.data(), &n, sizeof n);
    nonce.bytes[14] = 1;
    return nonce;
}

inline std::string_view view_of(const core::Nonce& nonce) {
    return {reinterpret_cast<const char*>(nonce.bytes.data()), nonce.bytes.size()};
}

inline core::Acquire acquire_of(std::uint64_t n, core::Policy policy = {}) {
    core::Acquire op;
    op.fingerprint.raw = key_of(n);
    op.owner.id = "owner";
    op.nonce = nonce_of(n);
    op.not_after.us = std::int64_t{1} << 52;
    op.policy = policy;
    op.starts_call = true;
    return op;
}

/// Of `bytes` bytes that do not compress and name their intent.
inline std::string body_of(std::uint64_t n, std::size_t bytes) {
    std::string body;
    for (std::uint64_t i = 0; body.size() < bytes; ++i) {
        body += base::sha256(std::to_string(n) + "." + std::to_string(i)).view();
    }
    body.resize(bytes);
    return body;
}

inline core::Complete complete_of(std::uint64_t n, core::FencingToken token, std::size_t bytes) {
    core::Complete op;
    op.token = token;
    op.nonce = nonce_of(n);
    op.answer.http_status = 200;
    op.answer.body = std::make_shared<const std::string>(body_of(n, bytes));
    op.answer.body_bytes = bytes;
    return op;
}

/// Submits and waits.
inline core::BatchResults ask(core::Store& store, std::vector<core::Item> items) {
    std::promise<core::BatchResults> promise;
    auto future = promise.get_future();
    store.submit(std::move(items),
                 [&](core::BatchResults results) { promise.set_value(std::move(results)); });
    return future.get();
}

inline base::Result<core::Decided> ask(core::Store& store, const core::StoredKey& key,
                                       core::StoreOperation operation) {
    std::vector<core::Item> items;
    items.push_back({key, std::move(operation)});
    return std::move(ask(store, std::move(items)).front());
}

}  // namespace semel::integration
