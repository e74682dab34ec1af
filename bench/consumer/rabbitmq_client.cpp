// Bare librabbitmq: fills a queue and consumes it. The reference shares no code with what is
// measured.
//
//     bench_rabbitmq_client fill PORT QUEUE COUNT quorum|classic
//     bench_rabbitmq_client consume PORT QUEUE COUNT PREFETCH ACK_EVERY
//
// `fill`: persistent messages of 200 bytes of JSON with a property message-id, confirmed.
// `consume`: acknowledges ACK_EVERY at once; prints one JSON object.
#include <amqp.h>
#include <amqp_tcp_socket.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "fail.hpp"

namespace {

using bench::fail;
using Steady = std::chrono::steady_clock;

constexpr std::size_t message_bytes = 200;
constexpr std::uint64_t unconfirmed_max = 500;
constexpr int frame_max = 131072;

amqp_bytes_t bytes_of(const std::string& text) {
    return {text.size(), const_cast<char*>(text.data())};
}

class Connection {
  public:
    explicit Connection(int port) : state_(amqp_new_connection()) {
        amqp_socket_t* const socket = amqp_tcp_socket_new(state_);
        if (socket == nullptr || amqp_socket_open(socket, "127.0.0.1", port) != AMQP_STATUS_OK)
            fail("no connection");
        if (amqp_login(state_, "/", 0, frame_max, 60, AMQP_SASL_METHOD_PLAIN, "guest", "guest")
                .reply_type != AMQP_RESPONSE_NORMAL)
            fail("no login");
        amqp_channel_open(state_, 1);
        check("opening a channel");
    }
    ~Connection() {
        amqp_connection_close(state_, AMQP_REPLY_SUCCESS);
        amqp_destroy_connection(state_);
    }
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    void check(const char* doing) {
        if (amqp_get_rpc_reply(state_).reply_type != AMQP_RESPONSE_NORMAL)
            fail(std::string(doing) + " failed");
    }
    [[nodiscard]] amqp_connection_state_t state() const { return state_; }

  private:
    amqp_connection_state_t state_;
};

std::string payload(std::uint64_t n) {
    std::string out = "{\"messageId\":\"m-" + std::to_string(n) + "\",\"pad\":\"";
    out.append(message_bytes - 2 - out.size(), 'x');
    return out + "\"}";
}

void fill(Connection& connection, const std::string& queue, std::uint64_t count, bool quorum) {
    amqp_connection_state_t state = connection.state();
    amqp_table_entry_t type{};
    type.key = amqp_cstring_bytes("x-queue-type");
    type.value.kind = AMQP_FIELD_KIND_UTF8;
    type.value.value.bytes = amqp_cstring_bytes(quorum ? "quorum" : "classic");
    const amqp_table_t arguments{1, &type};
    amqp_queue_declare(state, 1, bytes_of(queue), 0, 1, 0, 0, arguments);
    connection.check("declaring the queue");
    amqp_confirm_select(state, 1);
    connection.check("asking for confirms");
    std::set<std::uint64_t> unconfirmed;
    for (std::uint64_t n = 1; n <= count; ++n) {
        const std::string id = "m-" + std::to_string(n), body = payload(n);
        amqp_basic_properties_t properties{};
        properties._flags = AMQP_BASIC_DELIVERY_MODE_FLAG | AMQP_BASIC_MESSAGE_ID_FLAG;
        properties.delivery_mode = 2;
        properties.message_id = bytes_of(id);
        if (amqp_basic_publish(state, 1, amqp_empty_bytes, bytes_of(queue), 0, 0, &properties,
                               bytes_of(body)) != AMQP_STATUS_OK)
            fail("publishing failed");
        unconfirmed.insert(n);
        while (unconfirmed.size() >= unconfirmed_max || (n == count && !unconfirmed.empty())) {
            amqp_frame_t frame;
            if (amqp_simple_wait_frame(state, &frame) != AMQP_STATUS_OK) fail("no confirm");
            if (frame.frame_type != AMQP_FRAME_METHOD) continue;
            if (frame.payload.method.id != AMQP_BASIC_ACK_METHOD) fail("a message was refused");
            const auto* ack = static_cast<amqp_basic_ack_t*>(frame.payload.method.decoded);
            unconfirmed.erase(ack->multiple != 0 ? unconfirmed.begin()
                                                 : unconfirmed.lower_bound(ack->delivery_tag),
                              unconfirmed.upper_bound(ack->delivery_tag));
            amqp_maybe_release_buffers(state);
        }
    }
}

double cpu_us() {
    rusage used{};
    ::getrusage(RUSAGE_SELF, &used);
    const auto us = [](const timeval& t) {
        return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_usec);
    };
    return us(used.ru_utime) + us(used.ru_stime);
}

void consume(Connection& connection, const std::string& queue, std::uint64_t count,
             std::uint16_t prefetch, std::uint64_t every) {
    amqp_connection_state_t state = connection.state();
    amqp_basic_qos(state, 1, 0, prefetch, 0);
    connection.check("setting the prefetch");
    amqp_basic_consume(state, 1, bytes_of(queue), amqp_empty_bytes, 0, 0, 0, amqp_empty_table);
    connection.check("subscribing");
    Steady::time_point first;
    std::size_t bytes = 0;
    for (std::uint64_t got = 1; got <= count; ++got) {
        amqp_maybe_release_buffers(state);
        amqp_envelope_t envelope;
        const timeval patience{20, 0};
        if (amqp_consume_message(state, &envelope, &patience, 0).reply_type != AMQP_RESPONSE_NORMAL)
            fail("only " + std::to_string(got - 1) + " messages came");
        if (got == 1) first = Steady::now();
        bytes += envelope.message.body.len;
        if (got % every == 0 || got == count) amqp_basic_ack(state, 1, envelope.delivery_tag, 1);
        amqp_destroy_envelope(&envelope);
    }
    const double seconds = std::chrono::duration<double>(Steady::now() - first).count();
    std::printf("{\"messages\":%llu,\"bytes\":%zu,\"per_second\":%.1f,\"cpu_us\":%.3f}\n",
                static_cast<unsigned long long>(count), bytes, static_cast<double>(count) / seconds,
                cpu_us() / static_cast<double>(count));
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (argc < 6) fail("see the top of bench/consumer/rabbitmq_client.cpp");
    Connection connection(std::atoi(argv[2]));
    const std::uint64_t count = std::strtoull(argv[4], nullptr, 10);
    if (mode == "fill" && argc == 6) {
        fill(connection, argv[3], count, std::string(argv[5]) == "quorum");
    } else if (mode == "consume" && argc == 7) {
        consume(connection, argv[3], count, static_cast<std::uint16_t>(std::atoi(argv[5])),
                std::strtoull(argv[6], nullptr, 10));
    } else {
        fail("see the top of bench/consumer/rabbitmq_client.cpp");
    }
}
