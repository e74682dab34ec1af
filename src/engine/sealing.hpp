// Sealing: what of a record, its chunks and its conversation's turns is encrypted under its tenant's data key, and how it is
// opened again. Values in, values out; no I/O.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "base/aead.hpp"
#include "core/store.hpp"

namespace semel::engine {

/// A sealed piece: version (1), key id (8), salt (12), counter (8), ciphertext, tag (16). docs/internals/sealing.md.
struct SealedPiece {
    static constexpr std::uint8_t version = 1;
    static constexpr std::size_t salt_bytes = 12;
    static constexpr std::size_t head_bytes = 1 + 8 + salt_bytes + 8;
    static constexpr std::size_t overhead_bytes = head_bytes + base::AesKey::tag_bytes;

    std::uint64_t key_id = 0;
    std::string_view salt;
    std::uint64_t counter = 0;
    std::string_view sealed;  ///< Ciphertext and tag.
};
/// The parts of `bytes`, which must outlive them; nullopt: too short, of another version, or of no key.
std::optional<SealedPiece> read_sealed(std::string_view bytes);

/// What a sealed piece is and where it belongs; it opens as nothing else and nowhere else.
struct Place {
    enum class Kind : char { body = 'B', chunk = 'C', question = 'Q', reply = 'R', message = 'M' };
    Kind kind;
    const core::StoredKey& of;         ///< The record, the conversation, or the list of messages.
    std::uint32_t n = 0;               ///< Of a chunk.
    std::string_view request_id = {};  ///< Of a turn, as it is stored; of a message its place in the list, 8 bytes.
};

/// A tenant's data key. Thread-safe.
///
/// Every object seals under a subkey of its own, made from the data key and a random salt, and counts its messages: so the
/// processes that share a data key never use one nonce twice, however many messages they seal.
class DataKey {
  public:
    static constexpr std::size_t secret_bytes = 32;

    /// `id` is not 0; `secret` has secret_bytes.
    DataKey(core::TenantTag tenant, std::uint64_t id, std::string_view secret);
    ~DataKey();
    DataKey(const DataKey&) = delete;
    DataKey& operator=(const DataKey&) = delete;

    [[nodiscard]] std::uint64_t id() const { return id_; }
    [[nodiscard]] const core::TenantTag& tenant() const { return tenant_; }

    [[nodiscard]] std::string seal(const Place& place, std::string_view plain) const;
    /// Nullopt: sealed under another key, for another place, or damaged.
    [[nodiscard]] std::optional<std::string> open(const Place& place, std::string_view sealed) const;

    /// Seals an inline body, hides the digest and names the key. An answer without a kept body stays as it is.
    void seal(const core::StoredKey& key, core::Answer& answer) const;
    /// The contents of a turn, and the client's id within them; the id becomes `stored_id`.
    void seal(core::Append& turn, std::string stored_id) const;
    /// The counterpart: as it was before. False: it cannot be opened, and `turn` holds neither id nor contents now.
    bool open(core::Append& turn) const;
    /// Hides the values of the field marks; equal ones of one record stay equal. The first mark, of name 0, names the key.
    void hide(const core::StoredKey& key, core::Fingerprint& fingerprint) const;

  private:
    friend core::RecordPtr opened(const core::StoredKey&, core::RecordPtr, const DataKey*,
                                  const std::shared_ptr<const std::string>&);
    void mask(const core::StoredKey& key, core::Fingerprint& fingerprint, std::size_t first) const;
    void mask(const core::StoredKey& key, base::Digest& digest) const;
    [[nodiscard]] std::shared_ptr<const base::AesKey> subkey(std::string_view salt) const;

    core::TenantTag tenant_;
    std::uint64_t id_;
    std::array<std::uint8_t, secret_bytes> secret_{};
    base::AesKey masks_;
    std::array<std::uint8_t, SealedPiece::salt_bytes> salt_{};  ///< Of this object's own messages.
    std::shared_ptr<const base::AesKey> own_;
    mutable std::atomic<std::uint64_t> last_{0};
    /// Subkeys of other objects, that is of other processes and earlier runs.
    static constexpr std::size_t foreign_max = 64;
    mutable std::mutex mutex_;
    mutable std::map<std::string, std::shared_ptr<const base::AesKey>, std::less<>> foreign_;  // guarded by mutex_
};

using DataKeyPtr = std::shared_ptr<const DataKey>;

/// Whether anything in it needs its tenant's key.
bool is_sealed(const core::Record& record);
/// The record as its owner wrote it, `sealed_under` 0. Without its key (`data_key` null or another one) its answer is one that was
/// not kept, and still names the key; its field marks and its turn's contents are gone. The same pointer if nothing is sealed.
/// `body`: of an inline answer, where it is at hand; else it is deciphered.
core::RecordPtr opened(const core::StoredKey& key, core::RecordPtr record, const DataKey* data_key,
                       const std::shared_ptr<const std::string>& body = nullptr);
/// A turn as it was said. Without its key: number and time only, id and contents empty.
void open_turn(const core::StoredKey& conversation, core::Turn& turn, const DataKey* data_key);
/// Whether open_turn found the key gone: what a user says is never empty.
inline bool erased(const core::Turn& turn) { return turn.user_content.empty(); }
/// What an acquire was answered, opened: the records of Replay, UnknownOutcome and Exhausted, the fields of Mismatch.
void open_answered(const core::StoredKey& key, core::StoreOutcome& outcome, const DataKey* data_key);
/// What Get, GetChunk (of chunk `n`) and GetTurns found, opened. A chunk that cannot be opened becomes ChunkMissing; without a
/// key it stays as it is.
void open_found(const core::StoredKey& key, std::uint32_t n, core::StoreOutcome& outcome, const DataKey* data_key);
/// The fields that a Mismatch names, without the key's own mark; none if the two were hidden under different keys.
void unname_hidden(core::Mismatch& mismatch);

}  // namespace semel::engine
