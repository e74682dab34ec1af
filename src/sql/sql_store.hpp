// A core::Store on sessions of one database. Several processes may use one.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/store.hpp"
#include "sql/session.hpp"

namespace semel::sql {

struct SqlStoreOptions {
    std::string name;             ///< "postgres" or "mysql", begins every error's detail.
    unsigned connections = 4;     ///< Batches in flight, each on a thread and a session of its own. At least 1.
    std::size_t batch_max = 64;   ///< Most items of one statement. 1: every item alone (to measure).
    milliseconds lock_wait{100};  ///< See Ask.
    milliseconds deadline{2000};
    /// An item whose row stays locked by others, or that finds no session, is given up after that: nothing was done.
    milliseconds patience{3000};
    std::function<core::StoreTime()> time;  ///< See Ask::time. Empty: the database's clock.
    core::Durability durability;
};

/// Queues what is submitted and lets `connections` workers take it in batches of like operations: while all are busy the next
/// batches grow. A batch that the database rolled back (a lock, a deadlock, one bad row) is repeated item by item, so that only
/// the item at fault waits or fails. Items of one batch on the same key are decided one after the other. An acquire whose answer
/// was lost is read back by its nonce; any other lost answer is an error with applied = unknown. Offers core::AnswersSingly: an
/// item that waits for a lock then delays no other of its batch.
/// `first` (may be null) is used by the first worker; scans and purges run on a session of their own, made when first needed.
std::unique_ptr<core::Store> make_sql_store(SqlStoreOptions options, Connect connect, std::unique_ptr<Session> first);

}  // namespace semel::sql
