// Any bytes as a record or a turn out of Redis: refused, or a record that is written back the same and that decide() can take.
#include "base/assert.hpp"
#include "core/transition.hpp"
#include "stores/redis/layout.hpp"

using namespace semel;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view bytes(reinterpret_cast<const char*>(data), size);
    const stores::redis::Names names("semel");
    if (const auto name = names.parse(bytes); name.kind == stores::redis::Names::Parsed::Kind::record)
        SEMEL_ASSERT(names.record(name.key).size() == bytes.size(), "a name has one length");
    if (const auto turn = stores::redis::decode_turn(bytes))
        SEMEL_ASSERT(turn->request_id.size() <= bytes.size(), "a turn holds no more than its bytes");
    const auto record = stores::redis::decode(bytes);
    if (!record) return 0;
    std::string again;
    stores::redis::encode(*record, again);
    SEMEL_ASSERT(stores::redis::decode(again), "what was read can be written and read");
    const auto found = std::make_shared<const core::Record>(*record);
    const core::StoreTime now{static_cast<std::int64_t>(record->token.value)};
    core::decide(found, core::Get{}, now);
    // The store's own acquires read before they ask: what has been decided is decided here.
    core::Acquire acquire;
    acquire.not_after = now;
    acquire.fingerprint = record->fingerprint;
    if (record->status == core::Status::completed) core::decide(found, acquire, now);
    return 0;
}
