// SHA-256 and HMAC-SHA-256 over OpenSSL, and the digests' type.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

namespace semel::base {

/// 32 bytes, compared as bytes.
struct Digest {
    std::array<std::uint8_t, 32> bytes{};

    friend bool operator==(const Digest&, const Digest&) = default;
    friend auto operator<=>(const Digest&, const Digest&) = default;
    [[nodiscard]] std::string_view view() const {
        return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
    }
    [[nodiscard]] bool empty() const { return *this == Digest{}; }
};

/// For hash tables: a digest is already uniformly distributed.
struct DigestHash {
    std::size_t operator()(const Digest& d) const noexcept {
        std::size_t h = 0;
        std::memcpy(&h, d.bytes.data(), sizeof h);
        return h;
    }
};

/// Incremental SHA-256. Not thread-safe; movable.
class Sha256 {
  public:
    Sha256();
    ~Sha256();
    Sha256(Sha256&&) noexcept;
    Sha256& operator=(Sha256&&) noexcept;
    Sha256& update(std::string_view bytes);
    /// Digest of all that was given; starts anew afterwards.
    Digest finish();

  private:
    struct State;
    std::unique_ptr<State> state_;
};

Digest sha256(std::string_view bytes);

/// HMAC-SHA-256 under one secret. The secret's two pads are hashed once, so that a short message
/// costs two compressions. Thread-safe after construction.
class Hmac {
  public:
    explicit Hmac(std::string_view secret);
    ~Hmac();
    Hmac(const Hmac&) = delete;
    Hmac& operator=(const Hmac&) = delete;
    [[nodiscard]] Digest operator()(std::string_view message) const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

std::string hex(std::string_view bytes);
/// Unpadded base64url (RFC 4648 section 5).
std::string base64url(std::string_view bytes);
/// The inverse of `base64url` for 32 bytes; false if `text` is not that (leaves `out` as it was).
bool digest_from_base64url(std::string_view text, Digest& out);
/// Equal in a time that depends on the lengths only.
bool equal_constant_time(std::string_view a, std::string_view b);
/// `n` bytes from the operating system's generator.
std::string random_bytes(std::size_t n);

}  // namespace semel::base
