#include "base/aead.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <memory>

#include "base/assert.hpp"

namespace semel::base {
namespace {

/// Contexts of one thread and direction that remember their key.
constexpr std::size_t remembered_keys = 8;

std::uint64_t next_serial() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
}

/// Fetched once: a context that is set up with a named cipher looks it up each time.
const EVP_CIPHER* cipher(const char* name) {
    EVP_CIPHER* fetched = EVP_CIPHER_fetch(nullptr, name, nullptr);
    SEMEL_ASSERT(fetched != nullptr, "OpenSSL has AES-256");
    return fetched;
}
const EVP_CIPHER* gcm() {
    static const EVP_CIPHER* const fetched = cipher("AES-256-GCM");
    return fetched;
}
const EVP_CIPHER* ecb() {
    static const EVP_CIPHER* const fetched = cipher("AES-256-ECB");
    return fetched;
}

struct FreeContext {
    void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
};

/// The contexts of a thread for one use of keys.
class Contexts {
  public:
    enum class Use { seal, open, encrypt };
    explicit Contexts(Use use) : use_(use) {}

    EVP_CIPHER_CTX* with(std::uint64_t serial, const std::uint8_t* key) {
        Slot& slot = slots_[serial % remembered_keys];
        if (slot.serial == serial) return slot.context.get();
        if (!slot.context) slot.context.reset(EVP_CIPHER_CTX_new());
        SEMEL_ASSERT(slot.context != nullptr, "there is memory for a cipher's context");
        const int ok =
            use_ == Use::open
                ? EVP_DecryptInit_ex2(slot.context.get(), gcm(), key, nullptr, nullptr)
                : EVP_EncryptInit_ex2(slot.context.get(), use_ == Use::seal ? gcm() : ecb(), key,
                                      nullptr, nullptr);
        SEMEL_ASSERT(ok == 1, "a key of 32 bytes is one of AES-256");
        if (use_ == Use::encrypt) EVP_CIPHER_CTX_set_padding(slot.context.get(), 0);
        slot.serial = serial;
        return slot.context.get();
    }

  private:
    struct Slot {
        std::uint64_t serial = 0;
        std::unique_ptr<EVP_CIPHER_CTX, FreeContext> context;
    };
    Use use_;
    std::array<Slot, remembered_keys> slots_;
};

const unsigned char* bytes(std::string_view text) {
    return reinterpret_cast<const unsigned char*>(text.data());
}

int length(std::size_t size) {
    SEMEL_ASSERT(size <= std::size_t{std::numeric_limits<int>::max()},
                 "messages are smaller than 2 GiB");
    return static_cast<int>(size);
}

}  // namespace

AesKey::AesKey(std::string_view key) : serial_(next_serial()) {
    SEMEL_ASSERT(key.size() == key_.size(), "an AES-256 key has 32 bytes");
    std::memcpy(key_.data(), key.data(), key_.size());
}

AesKey::~AesKey() { OPENSSL_cleanse(key_.data(), key_.size()); }

void AesKey::seal(const Nonce& nonce, std::string_view associated, std::string_view plain,
                  std::string& out) const {
    thread_local Contexts contexts(Contexts::Use::seal);
    EVP_CIPHER_CTX* const context = contexts.with(serial_, key_.data());
    const std::size_t begin = out.size();
    out.resize(begin + plain.size() + tag_bytes);
    auto* to = reinterpret_cast<unsigned char*>(out.data()) + begin;
    int written = 0;
    int rest = 0;
    bool ok = EVP_EncryptInit_ex2(context, nullptr, nullptr, nonce.data(), nullptr) == 1;
    if (!associated.empty())
        ok = ok && EVP_EncryptUpdate(context, nullptr, &written, bytes(associated),
                                     length(associated.size())) == 1;
    written = 0;
    if (!plain.empty())
        ok =
            ok && EVP_EncryptUpdate(context, to, &written, bytes(plain), length(plain.size())) == 1;
    ok = ok && EVP_EncryptFinal_ex(context, to + written, &rest) == 1 &&
         EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, tag_bytes, to + plain.size()) == 1;
    SEMEL_ASSERT(ok, "AES-GCM seals whatever it is given");
}

bool AesKey::open(const Nonce& nonce, std::string_view associated, std::string_view sealed,
                  std::string& out) const {
    if (sealed.size() < tag_bytes) return false;
    thread_local Contexts contexts(Contexts::Use::open);
    EVP_CIPHER_CTX* const context = contexts.with(serial_, key_.data());
    const std::size_t size = sealed.size() - tag_bytes;
    std::array<unsigned char, tag_bytes> tag{};
    std::memcpy(tag.data(), sealed.data() + size, tag_bytes);
    const std::size_t begin = out.size();
    out.resize(begin + size);
    auto* to = reinterpret_cast<unsigned char*>(out.data()) + begin;
    int written = 0;
    int rest = 0;
    bool ok = EVP_DecryptInit_ex2(context, nullptr, nullptr, nonce.data(), nullptr) == 1;
    if (!associated.empty())
        ok = ok && EVP_DecryptUpdate(context, nullptr, &written, bytes(associated),
                                     length(associated.size())) == 1;
    written = 0;
    if (size != 0)
        ok = ok && EVP_DecryptUpdate(context, to, &written, bytes(sealed), length(size)) == 1;
    ok = ok && EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, tag_bytes, tag.data()) == 1 &&
         EVP_DecryptFinal_ex(context, to + written, &rest) == 1;
    if (ok) return true;
    OPENSSL_cleanse(to, size);  // never given out before it is known to be whole
    out.resize(begin);
    return false;
}

void AesKey::encrypt(std::span<Block> blocks) const {
    if (blocks.empty()) return;
    thread_local Contexts contexts(Contexts::Use::encrypt);
    EVP_CIPHER_CTX* const context = contexts.with(serial_, key_.data());
    auto* const at = blocks.front().data();
    int written = 0;
    const bool ok =
        EVP_EncryptUpdate(context, at, &written, at, length(blocks.size_bytes())) == 1 &&
        static_cast<std::size_t>(written) == blocks.size_bytes();
    SEMEL_ASSERT(ok, "whole blocks are encrypted in place");
}

void wipe(std::string& secret) {
    OPENSSL_cleanse(secret.data(), secret.size());
    secret.clear();
}
void wipe(std::span<std::uint8_t> secret) { OPENSSL_cleanse(secret.data(), secret.size()); }

}  // namespace semel::base
