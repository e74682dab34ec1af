// AES-256 over OpenSSL: sealing with GCM, and single blocks as a keyed pseudo-random function.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace semel::base {

/// One AES-256 key. Thread-safe; wiped when it is destroyed. OpenSSL's contexts are kept per thread and remember the last few
/// keys, so that a message under a key of late costs no key schedule.
class AesKey {
  public:
    static constexpr std::size_t key_bytes = 32;
    static constexpr std::size_t nonce_bytes = 12;
    static constexpr std::size_t tag_bytes = 16;
    static constexpr std::size_t block_bytes = 16;
    using Nonce = std::array<std::uint8_t, nonce_bytes>;
    using Block = std::array<std::uint8_t, block_bytes>;

    /// `key` has key_bytes (asserted).
    explicit AesKey(std::string_view key);
    ~AesKey();
    AesKey(const AesKey&) = delete;
    AesKey& operator=(const AesKey&) = delete;

    /// Appends ciphertext and tag of `plain` to `out`. A nonce must never be used twice under one key: who sees two messages of
    /// one nonce can forge others. `plain` may be empty.
    void seal(const Nonce& nonce, std::string_view associated, std::string_view plain, std::string& out) const;
    /// Appends the plain text of `sealed` (ciphertext and tag) to `out`. False: it was not sealed under this key with this nonce
    /// and `associated`, or was changed; `out` is as it was.
    [[nodiscard]] bool open(const Nonce& nonce, std::string_view associated, std::string_view sealed,
                            std::string& out) const;

    /// Replaces each block by its encryption (ECB): for blocks that are all different it is a keyed pseudo-random function.
    void encrypt(std::span<Block> blocks) const;

  private:
    std::array<std::uint8_t, key_bytes> key_{};
    std::uint64_t serial_;  ///< Names the key to the contexts that remember it. Never used twice in a process.
};

/// Overwrites what was held before it is given up; a compiler does not leave it out.
void wipe(std::string& secret);
void wipe(std::span<std::uint8_t> secret);

}  // namespace semel::base
