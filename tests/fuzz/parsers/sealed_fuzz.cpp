// Any bytes where a sealed piece or a wrapped key is expected: refused, and nothing worse; what was sealed opens, changed it does not.
#include "base/assert.hpp"
#include "engine/vault.hpp"

namespace engine = semel::engine;
namespace core = semel::core;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const core::TenantTag tenant{{1}};
    static const engine::DataKey key(tenant, 7, std::string(engine::DataKey::secret_bytes, 'k'));
    static engine::Vault vault("secret", nullptr);
    static const core::StoredKey record = semel::base::sha256("record");
    const std::string_view bytes(reinterpret_cast<const char*>(data), size);
    const engine::Place place{.kind = engine::Place::Kind::body, .of = record};

    if (const auto piece = engine::read_sealed(bytes)) {
        SEMEL_ASSERT(piece->salt.size() == engine::SealedPiece::salt_bytes, "a piece names its salt");
        SEMEL_ASSERT(piece->sealed.size() + engine::SealedPiece::head_bytes == size, "and has nothing else");
    }
    SEMEL_ASSERT(!key.open(place, bytes), "nobody guesses a tag");
    SEMEL_ASSERT(!vault.take_key(tenant, std::string(bytes), 0, {}), "nobody guesses a wrapped key");

    const std::string sealed = key.seal(place, bytes);
    SEMEL_ASSERT(key.open(place, sealed) == bytes, "what was sealed opens as it was");
    std::string changed = sealed;
    const std::size_t at = size == 0 ? 0 : data[0] % sealed.size();
    changed[at] = static_cast<char>(changed[at] ^ (size > 1 && data[1] != 0 ? data[1] : 1));
    SEMEL_ASSERT(!key.open(place, changed), "what was changed does not");

    core::Turn turn{.number = 1, .request_id = "id", .user_content = std::string(bytes), .answer_content = sealed};
    engine::open_turn(record, turn, &key);
    SEMEL_ASSERT(!engine::read_sealed(bytes) || engine::erased(turn), "a turn that cannot be opened is erased");
    return 0;
}
