#include "base/aead.hpp"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "base/hash.hpp"

namespace semel::base {
namespace {

const std::string zero_key(AesKey::key_bytes, '\0');

TEST(Aead, seals_as_the_standard_says) {
    // Test cases 13 and 14 of the GCM specification (AES-256, no associated data).
    const AesKey key(zero_key);
    std::string sealed;
    key.seal({}, {}, {}, sealed);
    EXPECT_EQ(hex(sealed), "530f8afbc74536b9a963b4f1c4cb738b");
    sealed.clear();
    key.seal({}, {}, std::string(16, '\0'), sealed);
    EXPECT_EQ(hex(sealed), "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919");
    std::string plain = "before";
    ASSERT_TRUE(key.open({}, {}, sealed, plain));
    EXPECT_EQ(plain, "before" + std::string(16, '\0'));
}

TEST(Aead, a_block_is_encrypted_as_the_standard_says) {
    // FIPS-197, C.3.
    std::string bytes;
    for (char c = 0; c < 32; ++c) bytes.push_back(c);
    AesKey::Block block{};
    for (std::size_t i = 0; i < block.size(); ++i) block[i] = static_cast<std::uint8_t>(0x11 * i);
    std::vector<AesKey::Block> blocks(3, block);
    AesKey(bytes).encrypt(blocks);
    for (const AesKey::Block& one : blocks) {
        EXPECT_EQ(hex({reinterpret_cast<const char*>(one.data()), one.size()}),
                  "8ea2b7ca516745bfeafc49904b496089");
    }
}

TEST(Aead, what_does_not_open_leaves_nothing) {
    const AesKey key(zero_key);
    std::string sealed;
    key.seal({}, "associated", "secret", sealed);
    std::string out = "before";
    EXPECT_FALSE(key.open({}, "another", sealed, out));
    EXPECT_FALSE(key.open({1}, "associated", sealed, out));
    EXPECT_FALSE(key.open({}, "associated", sealed.substr(1), out));
    EXPECT_FALSE(key.open({}, "associated", "short", out));
    EXPECT_EQ(out, "before");
    EXPECT_TRUE(key.open({}, "associated", sealed, out)) << "a refusal leaves the context usable";
    EXPECT_EQ(out, "beforesecret");
}

TEST(Aead, many_keys_in_many_threads_do_not_mix) {
    std::vector<std::unique_ptr<AesKey>> keys;
    for (char c = 0; c < 40; ++c)
        keys.push_back(std::make_unique<AesKey>(std::string(AesKey::key_bytes, c)));
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&] {
            for (std::size_t i = 0; i < 2000; ++i) {
                const AesKey& key = *keys[i * 7 % keys.size()];
                const std::string text = std::to_string(i);
                std::string sealed;
                std::string plain;
                key.seal({}, {}, text, sealed);
                EXPECT_TRUE(key.open({}, {}, sealed, plain));
                EXPECT_EQ(plain, text);
                EXPECT_FALSE(keys[(i * 7 + 1) % keys.size()]->open({}, {}, sealed, plain));
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace semel::base
