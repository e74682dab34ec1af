#include "base/hash.hpp"

// The one-shot SHA256_* functions are deprecated in OpenSSL 3 in favour of EVP, which costs an
// allocation and a fetch per digest (three times the digest of a short body). They are kept in
// every OpenSSL 3.x.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <openssl/sha.h>

#include "base/assert.hpp"

namespace semel::base {

struct Sha256::State {
    SHA256_CTX context;
};

Sha256::Sha256() : state_(std::make_unique<State>()) { SHA256_Init(&state_->context); }
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

Sha256& Sha256::update(std::string_view bytes) {
    SHA256_Update(&state_->context, bytes.data(), bytes.size());
    return *this;
}

Digest Sha256::finish() {
    Digest digest;
    SHA256_Final(digest.bytes.data(), &state_->context);
    SHA256_Init(&state_->context);
    return digest;
}

Digest sha256(std::string_view bytes) {
    // Not the one-shot SHA256(): in OpenSSL 3 it fetches the algorithm by name each time, which costs more than the digest.
    SHA256_CTX context;
    Digest digest;
    SHA256_Init(&context);
    SHA256_Update(&context, bytes.data(), bytes.size());
    SHA256_Final(digest.bytes.data(), &context);
    return digest;
}

struct Hmac::State {
    SHA256_CTX inner;
    SHA256_CTX outer;
};

Hmac::Hmac(std::string_view secret) : state_(std::make_unique<State>()) {
    constexpr std::size_t block = 64;
    std::array<std::uint8_t, block> pad{};
    if (secret.size() > block) {
        const Digest folded = sha256(secret);
        std::memcpy(pad.data(), folded.bytes.data(), folded.bytes.size());
    } else if (!secret.empty()) {
        std::memcpy(pad.data(), secret.data(), secret.size());
    }
    for (auto& byte : pad) byte ^= 0x36;
    SHA256_Init(&state_->inner);
    SHA256_Update(&state_->inner, pad.data(), block);
    for (auto& byte : pad) byte ^= 0x36 ^ 0x5c;
    SHA256_Init(&state_->outer);
    SHA256_Update(&state_->outer, pad.data(), block);
    OPENSSL_cleanse(pad.data(), pad.size());
}

Hmac::~Hmac() { OPENSSL_cleanse(state_.get(), sizeof(State)); }

Digest Hmac::operator()(std::string_view message) const {
    SHA256_CTX context = state_->inner;
    Digest digest;
    SHA256_Update(&context, message.data(), message.size());
    SHA256_Final(digest.bytes.data(), &context);
    context = state_->outer;
    SHA256_Update(&context, digest.bytes.data(), digest.bytes.size());
    SHA256_Final(digest.bytes.data(), &context);
    return digest;
}

std::string hex(std::string_view bytes) {
    static constexpr char digits[] = "0123456789abcdef";
    std::string out;
    out.reserve(bytes.size() * 2);
    for (const char c : bytes) {
        const auto byte = static_cast<unsigned char>(c);
        out += digits[byte >> 4];
        out += digits[byte & 15];
    }
    return out;
}

namespace {
constexpr char base64url_alphabet[] =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
}

std::string base64url(std::string_view bytes) {
    std::string out((bytes.size() * 4 + 2) / 3, '\0');
    char* to = out.data();
    const auto* from = reinterpret_cast<const unsigned char*>(bytes.data());
    std::size_t left = bytes.size();
    for (; left >= 3; left -= 3, from += 3) {
        const std::uint32_t group = (std::uint32_t{from[0]} << 16) | (std::uint32_t{from[1]} << 8) | from[2];
        *to++ = base64url_alphabet[group >> 18];
        *to++ = base64url_alphabet[(group >> 12) & 63];
        *to++ = base64url_alphabet[(group >> 6) & 63];
        *to++ = base64url_alphabet[group & 63];
    }
    if (left > 0) {
        const std::uint32_t group = (std::uint32_t{from[0]} << 16) | (left == 2 ? std::uint32_t{from[1]} << 8 : 0);
        *to++ = base64url_alphabet[group >> 18];
        *to++ = base64url_alphabet[(group >> 12) & 63];
        if (left == 2) *to++ = base64url_alphabet[(group >> 6) & 63];
    }
    return out;
}

bool digest_from_base64url(std::string_view text, Digest& out) {
    if (text.size() != 43) return false;
    Digest digest;
    std::uint32_t buffer = 0;
    int bits = 0;
    std::size_t at = 0;
    for (const char c : text) {
        const void* found = std::memchr(base64url_alphabet, c, 64);
        if (found == nullptr) return false;
        buffer = (buffer << 6) |
                 static_cast<std::uint32_t>(static_cast<const char*>(found) - base64url_alphabet);
        bits += 6;
        if (bits >= 8) {
            bits -= 8;
            digest.bytes[at++] = static_cast<std::uint8_t>(buffer >> bits);
        }
    }
    if ((buffer & ((1u << bits) - 1)) != 0) return false;  // one spelling per digest
    out = digest;
    return true;
}

bool equal_constant_time(std::string_view a, std::string_view b) {
    return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string random_bytes(std::size_t n) {
    std::string out(n, '\0');
    const int ok = RAND_bytes(reinterpret_cast<unsigned char*>(out.data()), static_cast<int>(n));
    SEMEL_ASSERT(ok == 1, "the operating system gives random bytes");
    return out;
}

}  // namespace semel::base
