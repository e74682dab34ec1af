// Semel in your own program: consumers whose effects happen once, with C++ functions as their
// handlers. Standard library types only.
//
//     semel::Runtime runtime("semel.yaml");                      // consumers with `handler:
//     callback` runtime.on_transaction("orders", [](const semel::Message& m, semel::Transaction&
//     tx) -> semel::Outcome {
//         tx.execute("INSERT INTO orders(id, body) VALUES ($1, $2)", {m.id,
//         m.payload.value_or("")}); return semel::Done{};
//     });
//     return runtime.run();                                      // until SIGTERM, SIGINT or stop()
//
// Build: find_package(semel REQUIRED) and target_link_libraries(... semel::semel).
// docs/guides/cpp-consumer.md.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace semel {

/// The version of this library, as find_package knows it.
[[nodiscard]] std::string version();

/// One message, as a handler sees it. Views stay valid until the handler returns.
struct Message {
    std::string_view id;      ///< The same in every delivery of this message.
    std::string_view source;  ///< Whose ids these are.
    std::string_view topic;   ///< Topic, or queue.
    std::int32_t partition = 0;
    std::int64_t position = 0;                ///< Offset, or delivery tag.
    std::optional<std::string_view> key;      ///< None on RabbitMQ.
    std::optional<std::string_view> payload;  ///< Empty: a tombstone.
    std::vector<std::pair<std::string_view, std::optional<std::string_view>>> headers;
    std::uint32_t attempt = 1;  ///< 1: never tried before. In a transaction: as far as known.
    std::uint64_t fencing_token =
        0;  ///< Grows with each attempt; 0 in a transaction, which needs none.
};

/// What a handler answers: published where `results` of the configuration says, under the message's
/// id; dropped where it says nothing.
struct Answer {
    std::string body;  ///< At most 256 KiB, else the message becomes a dead letter.
    std::string content_type = "application/octet-stream";
    /// Go along beside message-id and content-type, which are Semel's.
    std::vector<std::pair<std::string, std::string>> headers{};
};
/// The effect happened (in a transaction: it is to be committed).
struct Done {
    std::optional<Answer> answer{};
};
/// What it needs is not there yet: run it again, `after` that long (0: the usual back-off). Counts
/// as a failure.
struct NotYet {
    std::string reason;
    std::chrono::milliseconds after{0};  ///< In a transaction always the usual back-off.
};
/// It failed and may end otherwise next time.
struct Failed {
    std::string reason;
    std::chrono::milliseconds after{0};  ///< The same.
};
/// Another try cannot end otherwise: a dead letter.
struct Fatal {
    std::string reason;
};
/// The effect may have happened: `on_unknown` of the configuration decides. In a transaction, which
/// knows, it is Failed.
struct Unknown {
    std::string reason;
};
using Outcome = std::variant<Done, NotYet, Failed, Fatal, Unknown>;

/// What a statement of a transaction is given.
using Value = std::variant<std::monostate, std::int64_t, std::string_view>;
/// A row's values as text; empty: NULL.
using Row = std::vector<std::optional<std::string>>;

/// The transaction that holds the message's dedup row: what is done in it happens with that row or
/// not at all. Used inside the handler only. A statement that fails leaves by an exception that the
/// handler must let pass: the whole is rolled back, and what was a lock or a deadlock runs again
/// without being charged.
class Transaction {
  public:
    Transaction(const Transaction&) = delete;
    Transaction& operator=(const Transaction&) = delete;

    /// Runs one statement ($1, $2 on PostgreSQL, ? on MySQL and MariaDB). The rows that it
    /// inserted, or matched.
    std::int64_t execute(std::string_view sql, std::initializer_list<Value> parameters = {});
    /// Runs one statement that gives rows.
    std::vector<Row> query(std::string_view sql, std::initializer_list<Value> parameters = {});

  private:
    friend class TransactionAccess;
    explicit Transaction(void* executor) : executor_(executor) {}
    void* executor_;
};

/// A handler of the strategies `store` and `table`. Called on several threads at once. An exception
/// counts as Failed.
using Handler = std::function<Outcome(const Message&)>;
/// A handler of the strategy `transaction`. May be called again for a message whose transaction was
/// rolled back.
using TransactionHandler = std::function<Outcome(const Message&, Transaction&)>;

/// The consumers of a configuration, those with a callback and those with none, and the admin
/// address (metrics, health, `semel consumer`). The gateway is no part of it: it runs in `semel
/// serve`, and so do consumers with `handler: ai`.
class Runtime {
  public:
    /// Nothing is read or opened before run().
    explicit Runtime(std::string config_path);
    ~Runtime();
    Runtime(const Runtime&) = delete;
    Runtime& operator=(const Runtime&) = delete;

    /// The handler of the consumer of that name, whose configuration says `handler: callback`.
    /// Before run().
    void on(const std::string& consumer, Handler handler);
    /// `batchable`: several messages may share a transaction, each inside a savepoint of its own.
    void on_transaction(const std::string& consumer, TransactionHandler handler,
                        bool batchable = false);

    /// Runs until SIGTERM or SIGINT, or until stop(); then what runs ends (20 s), what is finished
    /// is settled, and everything is closed. 0; 1: something could not be opened; 2: the
    /// configuration is wrong, or names a callback that is missing here; the log says what. Once;
    /// does not return before all handlers did. Takes the two signals on this thread: call it
    /// before other threads exist, or block them there. A second signal, while it ends, does what
    /// it did before: ends the process. SIGPIPE is ignored from here on, unless the program has
    /// said what it does.
    int run();
    /// From any thread, also from a handler.
    void stop();

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace semel
