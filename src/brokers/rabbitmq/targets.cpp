// What a consumer's start asks about queues and exchanges, on a connection of its own.
#include <amqp.h>
#include <amqp_framing.h>

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

/// Whether the broker closed the channel because what was asked for does not exist.
bool not_found(const amqp_rpc_reply_t& reply) {
    return reply.reply_type == AMQP_RESPONSE_SERVER_EXCEPTION &&
           reply.reply.id == AMQP_CHANNEL_CLOSE_METHOD &&
           static_cast<const amqp_channel_close_t*>(reply.reply.decoded)->reply_code ==
               AMQP_NOT_FOUND;
}

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

}  // namespace semel::brokers::rabbitmq
