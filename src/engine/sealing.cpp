#include "engine/sealing.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/assert.hpp"

namespace semel::engine {

using base::AesKey;
using core::StoredKey;

namespace {

/// Name mark of the field that names the data key: no HMAC is 0 in practice, and if one were, one
/// field would not be named.
constexpr std::uint64_t key_mark = 0;

void put_u64(std::string& out, std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8)
        out.push_back(static_cast<char>(value >> shift & 0xff));
}

std::uint64_t get_u64(std::string_view bytes) {
    std::uint64_t value = 0;
    for (std::size_t i = 8; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
    return value;
}

AesKey::Nonce nonce_of(std::uint64_t counter) {
    AesKey::Nonce nonce{};
    for (std::size_t i = 0; i < 8; ++i) nonce[i] = static_cast<std::uint8_t>(counter >> (8 * i));
    return nonce;
}

/// What a piece is authenticated with: version, kind, where it belongs. On the stack: it is made
/// for every piece.
class Associated {
  public:
    explicit Associated(const Place& place) {
        SEMEL_ASSERT(place.request_id.size() <= core::key_part_max_bytes,
                     "the id of a turn is stored as a short hash");
        put(static_cast<char>(SealedPiece::version));
        put(static_cast<char>(place.kind));
        put(place.of.view());
        for (int shift = 0; shift < 32; shift += 8) put(static_cast<char>(place.n >> shift & 0xff));
        put(place.request_id);
    }
    [[nodiscard]] std::string_view view() const { return {bytes_.data(), size_}; }

  private:
    void put(char c) { bytes_[size_++] = c; }
    void put(std::string_view part) {
        if (part.empty()) return;
        std::memcpy(bytes_.data() + size_, part.data(), part.size());
        size_ += part.size();
    }
    std::array<char, 2 + sizeof(base::Digest::bytes) + 4 + core::key_part_max_bytes> bytes_{};
    std::size_t size_ = 0;
};

template <std::size_t N>
std::string_view view(const std::array<std::uint8_t, N>& bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), N};
}

std::string derived(std::string_view secret, std::string_view purpose) {
    const base::Digest digest = base::Hmac(secret)(purpose);
    return std::string(digest.view());
}

}  // namespace

std::optional<SealedPiece> read_sealed(std::string_view bytes) {
    if (bytes.size() < SealedPiece::overhead_bytes) return std::nullopt;
    if (static_cast<std::uint8_t>(bytes.front()) != SealedPiece::version) return std::nullopt;
    bytes.remove_prefix(1);
    SealedPiece piece;
    piece.key_id = get_u64(bytes);
    if (piece.key_id == 0) return std::nullopt;
    piece.salt = bytes.substr(8, SealedPiece::salt_bytes);
    piece.counter = get_u64(bytes.substr(8 + SealedPiece::salt_bytes));
    piece.sealed = bytes.substr(SealedPiece::head_bytes - 1);
    return piece;
}

// -------------------------------------------------------------------- DataKey

DataKey::DataKey(core::TenantTag tenant, std::uint64_t id, std::string_view secret)
    : tenant_(tenant), id_(id), masks_(derived(secret, "masks")) {
    SEMEL_ASSERT(id != 0 && secret.size() == secret_bytes, "a data key has an id and 32 bytes");
    std::memcpy(secret_.data(), secret.data(), secret_bytes);
    const std::string salt = base::random_bytes(SealedPiece::salt_bytes);
    std::memcpy(salt_.data(), salt.data(), salt.size());
    own_ = subkey(salt);
}

DataKey::~DataKey() { base::wipe(secret_); }

std::shared_ptr<const AesKey> DataKey::subkey(std::string_view salt) const {
    std::string purpose = "seal";
    purpose += salt;
    return std::make_shared<const AesKey>(derived(view(secret_), purpose));
}

std::string DataKey::seal(const Place& place, std::string_view plain) const {
    const std::uint64_t counter = last_.fetch_add(1, std::memory_order_relaxed);
    std::string out;
    out.reserve(SealedPiece::overhead_bytes + plain.size());
    out.push_back(static_cast<char>(SealedPiece::version));
    put_u64(out, id_);
    out += view(salt_);
    put_u64(out, counter);
    own_->seal(nonce_of(counter), Associated(place).view(), plain, out);
    return out;
}

std::optional<std::string> DataKey::open(const Place& place, std::string_view sealed) const {
    const auto piece = read_sealed(sealed);
    if (!piece || piece->key_id != id_) return std::nullopt;
    std::shared_ptr<const AesKey> found;
    const AesKey* key = own_.get();
    if (piece->salt != view(salt_)) {
        const std::lock_guard lock(mutex_);
        auto it = foreign_.find(piece->salt);
        if (it == foreign_.end()) {
            if (foreign_.size() >= foreign_max) foreign_.clear();
            it = foreign_.emplace(piece->salt, subkey(piece->salt)).first;
        }
        found = it->second;
        key = found.get();
    }
    std::string plain;
    plain.reserve(piece->sealed.size());
    if (!key->open(nonce_of(piece->counter), Associated(place).view(), piece->sealed, plain))
        return std::nullopt;
    return plain;
}

void DataKey::seal(const StoredKey& key, core::Answer& answer) const {
    if (answer.body_kind == core::BodyKind::not_kept) return;
    answer.sealed_under = id_;
    if (!answer.body_digest.empty()) mask(key, answer.body_digest);
    if (answer.body) {
        const Place place{.kind = Place::Kind::body, .of = key};
        answer.body = std::make_shared<const std::string>(seal(place, *answer.body));
    }
}

void DataKey::seal(core::Append& turn, std::string stored_id) const {
    std::string question;
    question.reserve(8 + turn.request_id.size() + turn.user_content.size());
    put_u64(question, turn.request_id.size());
    question += turn.request_id;
    question += turn.user_content;
    turn.request_id = std::move(stored_id);
    turn.user_content = seal(
        {.kind = Place::Kind::question, .of = turn.conversation, .request_id = turn.request_id},
        question);
    if (!turn.answer_content.empty()) {
        turn.answer_content = seal(
            {.kind = Place::Kind::reply, .of = turn.conversation, .request_id = turn.request_id},
            turn.answer_content);
    }
    base::wipe(question);
}

bool DataKey::open(core::Append& turn) const {
    auto question = open(
        {.kind = Place::Kind::question, .of = turn.conversation, .request_id = turn.request_id},
        turn.user_content);
    std::optional<std::string> reply = std::string{};
    if (!turn.answer_content.empty()) {
        reply = open(
            {.kind = Place::Kind::reply, .of = turn.conversation, .request_id = turn.request_id},
            turn.answer_content);
    }
    const std::uint64_t id_size =
        question && question->size() >= 8 ? get_u64(*question) : UINT64_MAX;
    const bool whole = reply && question && id_size <= question->size() - 8;
    turn.request_id.clear();
    turn.user_content.clear();
    turn.answer_content.clear();
    if (!whole) return false;
    turn.request_id = question->substr(8, id_size);
    turn.user_content = question->substr(8 + id_size);
    turn.answer_content = std::move(*reply);
    return true;
}

void DataKey::hide(const StoredKey& key, core::Fingerprint& fingerprint) const {
    fingerprint.fields.insert(fingerprint.fields.begin(), core::FieldMark{key_mark, id_});
    mask(key, fingerprint, 1);
}

/// Adds (XOR) what the key makes of the record and the field's name: the same twice is as it was.
void DataKey::mask(const StoredKey& key, core::Fingerprint& fingerprint, std::size_t first) const {
    std::array<AesKey::Block, core::fingerprint_fields_max> blocks;
    for (std::size_t at = first; at < fingerprint.fields.size();) {
        const std::size_t count = std::min(blocks.size(), fingerprint.fields.size() - at);
        for (std::size_t i = 0; i < count; ++i) {
            std::memcpy(blocks[i].data(), key.bytes.data(), 8);
            std::memcpy(blocks[i].data() + 8, &fingerprint.fields[at + i].name, 8);
        }
        masks_.encrypt(std::span(blocks).first(count));
        for (std::size_t i = 0; i < count; ++i) {
            std::uint64_t pad = 0;
            std::memcpy(&pad, blocks[i].data(), sizeof pad);
            fingerprint.fields[at + i].value ^= pad;
        }
        at += count;
    }
}

void DataKey::mask(const StoredKey& key, base::Digest& digest) const {
    // Apart from the fields' blocks: these begin with the key's end.
    std::array<AesKey::Block, 2> blocks;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        std::memcpy(blocks[i].data(), key.bytes.data() + key.bytes.size() - AesKey::block_bytes,
                    AesKey::block_bytes);
        blocks[i][AesKey::block_bytes - 1] ^= static_cast<std::uint8_t>(i);
    }
    masks_.encrypt(blocks);
    for (std::size_t i = 0; i < digest.bytes.size(); ++i)
        digest.bytes[i] ^= blocks[i / AesKey::block_bytes][i % AesKey::block_bytes];
}

// -------------------------------------------------------------------- records and turns

namespace {

bool hidden(const core::Fingerprint& fingerprint) {
    return !fingerprint.fields.empty() && fingerprint.fields.front().name == key_mark;
}

bool is_sealed(const core::Append& turn) { return read_sealed(turn.user_content).has_value(); }

}  // namespace

bool is_sealed(const core::Record& record) {
    return (record.answer && record.answer->sealed_under != 0) || hidden(record.fingerprint) ||
           (record.turn && is_sealed(*record.turn));
}

core::RecordPtr opened(const StoredKey& key, core::RecordPtr record, const DataKey* data_key,
                       const std::shared_ptr<const std::string>& body) {
    if (!record || !is_sealed(*record)) return record;
    auto plain = std::make_shared<core::Record>(*record);
    auto& fields = plain->fingerprint.fields;
    if (hidden(plain->fingerprint)) {
        const bool ours = data_key != nullptr && fields.front().value == data_key->id();
        fields.erase(fields.begin());
        if (ours) {
            data_key->mask(key, plain->fingerprint, 0);
        } else {
            fields.clear();
        }
    }
    if (plain->answer && plain->answer->sealed_under != 0) {
        core::Answer& answer = *plain->answer;
        bool kept = data_key != nullptr && answer.sealed_under == data_key->id() &&
                    answer.body_kind != core::BodyKind::not_kept;
        if (kept && answer.body) {
            if (body) {
                answer.body = body;
            } else {
                auto text = data_key->open({.kind = Place::Kind::body, .of = key}, *answer.body);
                kept = text.has_value();
                if (text) answer.body = std::make_shared<const std::string>(std::move(*text));
            }
        }
        if (kept) {
            answer.sealed_under = 0;
            if (!answer.body_digest.empty()) data_key->mask(key, answer.body_digest);
        } else {
            answer.body_kind = core::BodyKind::not_kept;
            answer.body = nullptr;
            answer.chunk_count = 0;
            answer.body_digest = {};
        }
    }
    if (plain->turn && is_sealed(*plain->turn)) {
        auto turn = std::make_shared<core::Append>(*plain->turn);
        if (data_key == nullptr || !data_key->open(*turn)) {
            turn->request_id.clear();
            turn->user_content.clear();
            turn->answer_content.clear();
        }
        plain->turn = std::move(turn);
    }
    return plain;
}

void open_turn(const StoredKey& conversation, core::Turn& turn, const DataKey* data_key) {
    core::Append said{.conversation = conversation,
                      .request_id = std::move(turn.request_id),
                      .user_content = std::move(turn.user_content),
                      .answer_content = std::move(turn.answer_content)};
    if (is_sealed(said)) {
        if (data_key == nullptr || !data_key->open(said)) said = {};
    }
    turn.request_id = std::move(said.request_id);
    turn.user_content = std::move(said.user_content);
    turn.answer_content = std::move(said.answer_content);
}

void open_answered(const StoredKey& key, core::StoreOutcome& outcome, const DataKey* data_key) {
    if (auto* replay = std::get_if<core::Replay>(&outcome))
        replay->record = opened(key, std::move(replay->record), data_key);
    if (auto* unknown = std::get_if<core::UnknownOutcome>(&outcome))
        unknown->record = opened(key, std::move(unknown->record), data_key);
    if (auto* exhausted = std::get_if<core::Exhausted>(&outcome))
        exhausted->record = opened(key, std::move(exhausted->record), data_key);
    if (auto* mismatch = std::get_if<core::Mismatch>(&outcome)) unname_hidden(*mismatch);
}

void open_found(const StoredKey& key, std::uint32_t n, core::StoreOutcome& outcome,
                const DataKey* data_key) {
    if (auto* found = std::get_if<core::Found>(&outcome))
        found->record = opened(key, std::move(found->record), data_key);
    if (auto* turns = std::get_if<core::TurnsFound>(&outcome)) {
        for (core::Turn& turn : turns->turns) open_turn(key, turn, data_key);
    }
    if (auto* chunk = std::get_if<core::ChunkFound>(&outcome);
        chunk != nullptr && data_key != nullptr) {
        auto plain = data_key->open({.kind = Place::Kind::chunk, .of = key, .n = n}, chunk->bytes);
        if (plain) {
            chunk->bytes = std::move(*plain);
        } else {
            outcome = core::ChunkMissing{};
        }
    }
}

void unname_hidden(core::Mismatch& mismatch) {
    // Sorted: the key's own mark comes first. It differs exactly if the keys do, and then so does
    // everything else.
    if (!mismatch.fields.empty() && mismatch.fields.front() == key_mark) mismatch.fields.clear();
}

}  // namespace semel::engine
