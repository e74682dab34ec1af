// Takes orders from Kafka into PostgreSQL: each once, also when this is killed in the middle of one.
//
//     order_consumer semel.yaml
#include <semel/semel.hpp>

#include <cstdio>
#include <string>

namespace {

semel::Outcome take(const semel::Message& message, semel::Transaction& tx) {
    if (!message.payload) return semel::Fatal{"an order without a payload"};
    tx.execute("INSERT INTO orders (order_no, body) VALUES ($1, $2)", {message.id, *message.payload});
    const std::string sku(message.key.value_or("unknown"));
    if (tx.execute("UPDATE stock SET left_over = left_over - 1 WHERE sku = $1 AND left_over > 0", {sku}) == 0)
        return semel::NotYet{"no " + sku + " in stock"};  // nothing of this order stays; it is tried again
    const auto rows = tx.query("SELECT left_over FROM stock WHERE sku = $1", {sku});
    std::printf("took an order, %s left\n", rows.at(0).at(0).value_or("?").c_str());
    return semel::Done{};
}

}  // namespace

int main(int count, char** words) {
    if (count != 2) {
        std::fprintf(stderr, "wants the configuration's name\n");
        return 2;
    }
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    semel::Runtime runtime(words[1]);
    runtime.on_transaction("orders", take);
    return runtime.run();
}
