// DedupTable: records of messages in the table message_dedup, which people can query, with the
// semantics of core::decide. For effects that live elsewhere than in this database; where they live
// here, inbox.hpp does more with less.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/store.hpp"
#include "inbox/names.hpp"
#include "sql/executor.hpp"

namespace semel::inbox {

struct DedupOptions {
    std::string scope;  ///< See MessageName and check_label().
    Place place;
    std::chrono::milliseconds lock_wait{
        100};  ///< For a row that another transaction holds. MySQL counts in whole seconds.
    std::chrono::milliseconds patience{5000};  ///< An item whose row stays locked, or is always
                                               ///< changed by others, is given up then.
    /// Told to the statements instead of the database's clock: for tests that must move time.
    /// Empty: the database's clock.
    std::function<core::StoreTime()> time;
};

/// One step on one message. Of an acquire: policy.kind must be IntentKind::message.
struct DedupItem {
    std::string source;
    std::string id;
    core::Operation operation;
    std::string business_key;  ///< For people; written when the row is made.
};

/// Thread-safe: holds nothing but its options. An Executor is used by one call at a time, and must
/// not be inside a transaction.
class DedupTable {
  public:
    explicit DedupTable(DedupOptions options) : options_(std::move(options)) {}

    /// Applies the items as if one after the other (several may name one message), each atomically;
    /// one result per item, in their order. Two round trips where nobody interferes: rows and the
    /// database's time are read, core::decide judges, and what it changes is written if the rows
    /// are still the same; else again. No lock is held between the two. A row without a fingerprint
    /// (from the inbox, a migration, or because none was given) matches every fingerprint. Errors:
    /// invalid_argument (a name, the options, the connection is inside a transaction),
    /// store_unavailable (locks, or rows that others keep changing, for longer than `patience`; the
    /// connection), store_full, store_corrupt, store_version. With applied unknown the step may
    /// have taken effect: ask again on a new connection, with the same nonce or token.
    std::vector<base::Result<core::Decided>> apply(sql::Executor& executor,
                                                   std::vector<DedupItem> items) const;

    /// Removes at most `limit` rows of all scopes whose expire_at has passed, the oldest first;
    /// says how many are gone. Skips what others have locked. Never removes an undecided message.
    base::Result<std::size_t> purge(sql::Executor& executor, std::size_t limit) const;

    [[nodiscard]] const DedupOptions& options() const { return options_; }

  private:
    DedupOptions options_;
};

}  // namespace semel::inbox
