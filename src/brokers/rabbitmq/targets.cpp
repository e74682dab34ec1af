// What a consumer's start asks about queues and exchanges, on a connection of its own.
#include <amqp.h>
#include <amqp_framing.h>

#include <array>

#include "brokers/rabbitmq/connection.hpp"

namespace semel::brokers::rabbitmq {

namespace {

constexpr std::chrono::seconds kHeartbeat{10};

base::Result<std::unique_ptr<Connection>> connected(const Access& access) {
    auto endpoint = parse_url(access.url);
    if (!endpoint) return std::move(endpoint.error());
    auto connection = std::make_unique<Connection>(std::move(*endpoint), "semel start",
                                                   access.ca_file, kHeartbeat);
    if (auto error = connection->open()) return std::move(*error);
    return connection;
}

/// Why the broker closed the channel over what was asked; 0: it did not.
int refusal(const amqp_rpc_reply_t& reply) {
    if (reply.reply_type != AMQP_RESPONSE_SERVER_EXCEPTION ||
        reply.reply.id != AMQP_CHANNEL_CLOSE_METHOD)
        return 0;
    return static_cast<const amqp_channel_close_t*>(reply.reply.decoded)->reply_code;
}

/// Whether the broker closed the channel because what was asked for does not exist.
bool not_found(const amqp_rpc_reply_t& reply) { return refusal(reply) == AMQP_NOT_FOUND; }

base::Result<bool> found(Connection& connection, const std::string& queue,
                         const std::string& exchange) {
    const amqp_connection_state_t state = connection.state();
    if (exchange.empty()) {
        amqp_queue_declare(state, work_channel, bytes(queue), 1, 0, 0, 0, amqp_empty_table);
    } else {
        amqp_exchange_declare(state, work_channel, bytes(exchange), amqp_cstring_bytes("direct"), 1,
                              0, 0, 0, amqp_empty_table);
    }
    const amqp_rpc_reply_t reply = amqp_get_rpc_reply(state);
    if (reply.reply_type == AMQP_RESPONSE_NORMAL) {
        connection.close();
        return true;
    }
    if (not_found(reply)) return false;
    return reply_error(reply, "looking for " + (exchange.empty() ? "the queue " + queue
                                                                 : "the exchange " + exchange));
}

}  // namespace

base::Result<bool> target_exists(const Access& access, const std::string& queue,
                                 const std::string& exchange) {
    auto connection = connected(access);
    if (!connection) return std::move(connection.error());
    return found(**connection, queue, exchange);
}

base::Result<void> ensure_queue(const Access& access, const std::string& queue) {
    // Asked first: one that was made otherwise, as a classic queue, serves as well.
    auto exists = target_exists(access, queue, {});
    if (!exists) return std::move(exists.error());
    if (*exists) return {};
    auto connection = connected(access);
    if (!connection) return std::move(connection.error());
    amqp_table_entry_t type{};
    type.key = amqp_cstring_bytes("x-queue-type");
    type.value.kind = AMQP_FIELD_KIND_UTF8;
    type.value.value.bytes = amqp_cstring_bytes("quorum");
    amqp_queue_declare((*connection)->state(), work_channel, bytes(queue), 0, 1, 0, 0,
                       {.num_entries = 1, .entries = &type});
    if (auto error = (*connection)->last_error("making the queue " + queue))
        return std::move(*error);
    (*connection)->close();
    return {};
}

base::Result<bool> delay_queue(const Access& access, const DelayQueue& queue, bool make) {
    auto exists = target_exists(access, queue.name, {});
    if (!exists) return std::move(exists.error());
    if (!*exists && !make) return false;
    auto connection = connected(access);
    if (!connection) return std::move(connection.error());
    std::array<amqp_table_entry_t, 6> entries{};
    std::size_t used = 0;
    const auto text = [&](const char* key, amqp_bytes_t value) {
        entries[used].key = amqp_cstring_bytes(key);
        entries[used].value.kind = AMQP_FIELD_KIND_UTF8;
        entries[used++].value.value.bytes = value;
    };
    text("x-queue-type", amqp_cstring_bytes("quorum"));
    text("x-dead-letter-exchange", amqp_cstring_bytes(""));
    text("x-dead-letter-routing-key", bytes(queue.target));
    // With these two a message leaves the queue only once the target has confirmed it.
    text("x-dead-letter-strategy", amqp_cstring_bytes("at-least-once"));
    text("x-overflow", amqp_cstring_bytes("reject-publish"));
    entries[used].key = amqp_cstring_bytes("x-message-ttl");
    entries[used].value.kind = AMQP_FIELD_KIND_I64;
    entries[used++].value.value.i64 = queue.delay.count();
    const amqp_connection_state_t state = (*connection)->state();
    amqp_queue_declare(state, work_channel, bytes(queue.name), 0, 1, 0, 0,
                       {.num_entries = static_cast<int>(used), .entries = entries.data()});
    const amqp_rpc_reply_t reply = amqp_get_rpc_reply(state);
    if (reply.reply_type == AMQP_RESPONSE_NORMAL) {
        (*connection)->close();
        return true;
    }
    // Who may publish need not be allowed to declare: what there is has to be believed then.
    const int code = refusal(reply);
    if (*exists && code == AMQP_ACCESS_REFUSED) return true;
    base::Error error =
        reply_error(reply, (make ? "making the queue " : "looking at the queue ") + queue.name);
    if (code == AMQP_PRECONDITION_FAILED || code == AMQP_RESOURCE_LOCKED) {
        error.code = base::ErrorCode::invalid_argument;
        error.detail +=
            ": there is a queue of that name that is made otherwise, and messages in it "
            "might be lost, or never come back; delete it once it is empty";
    }
    return error;
}

}  // namespace semel::brokers::rabbitmq
