// Records: where the strategies keep what they know of each message: the configured store, or the
// table message_dedup of a database.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "consumer/message.hpp"
#include "core/store.hpp"
#include "engine/vault.hpp"
#include "inbox/dedup_table.hpp"
#include "inbox/inbox.hpp"
#include "runtime/loop.hpp"

namespace semel::consumer {

/// One step on one message's record.
struct RecordStep {
    base::Digest key;                      ///< Message::key.
    std::string source, id, business_key;  ///< Needed by a table only, when the row is made.
    core::Operation operation;
};
/// `operation` on the record of `message`.
RecordStep step_on(const Message& message, core::Operation operation);
using RecordSteps = std::vector<RecordStep>;
/// One per step, in their order, as core::BatchResults.
using RecordsDone = std::function<void(std::vector<base::Result<core::Decided>>)>;

/// For one loop. Several batches may be on their way at once; who needs an order on one key waits
/// for the answer.
class Records {
  public:
    Records() = default;
    Records(const Records&) = delete;
    Records& operator=(const Records&) = delete;
    virtual ~Records() = default;

    /// `done` on the loop, once, never before submit returns.
    virtual void submit(RecordSteps steps, RecordsDone done) = 0;
    /// Batches on their way.
    [[nodiscard]] virtual std::size_t out() const = 0;
    /// Whether it needs the names in a step (source, id, business key), not only the key.
    [[nodiscard]] virtual bool by_name() const { return true; }
    /// "rocksdb ./semel-data", "table message_dedup of postgres 127.0.0.1:5432/shop".
    [[nodiscard]] virtual std::string name() const = 0;
};

/// Whose data key the answers in records are sealed under. `vault`: of the store, and outlives the
/// records.
struct AnswersOf {
    engine::Vault& vault;
    core::TenantTag tenant;
};
/// On a core::Store, under HMAC("message", key) by the deployment's secret (outlives it), as all
/// stored keys. `name`: of the store. `answers`: those of completions are sealed, and those of
/// replays opened; one whose key is gone is then not kept, and names the key (answer_is_gone).
/// Empty: records are written and read as they are, for who records no answers.
std::unique_ptr<Records> records_on_store(runtime::Loop& loop, core::Store& store,
                                          const base::Hmac& secret, std::string name,
                                          std::optional<AnswersOf> answers = {});
/// Whether the record had an answer that nobody can open any more: its tenant was erased.
inline bool answer_is_gone(const core::Record& record) {
    return record.answer && record.answer->body_kind == core::BodyKind::not_kept &&
           record.answer->sealed_under != 0;
}
/// On message_dedup, with `connections` threads that each hold a connection from `connect`.
std::unique_ptr<Records> records_on_table(runtime::Loop& loop, inbox::DedupOptions options,
                                          inbox::Connect connect, unsigned connections,
                                          std::string name);

}  // namespace semel::consumer
