package inbox;

import java.lang.management.ManagementFactory;
import java.util.concurrent.atomic.AtomicLong;

import org.springframework.beans.factory.annotation.Value;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.jdbc.core.JdbcTemplate;
import org.springframework.kafka.annotation.KafkaListener;
import org.springframework.stereotype.Component;
import org.springframework.transaction.annotation.Transactional;
import tools.jackson.databind.ObjectMapper;
import tools.jackson.databind.json.JsonMapper;

/**
 * The inbox as teams with Spring write it: one @Transactional method a message, which inserts the message's id into a table of
 * its own and, if it was not there, the business row; concurrency 3, and Spring's default acknowledgement, one for each batch
 * that was polled. Prints its rates when bench.expect messages were seen.
 */
@SpringBootApplication
public class Inbox {
    record Order(String messageId, String orderNo, int productId, int quantity, String pad) { }

    public static void main(String[] args) {
        SpringApplication.run(Inbox.class, args);
    }

    @Component
    static class Orders {
        private final JdbcTemplate jdbc;

        Orders(JdbcTemplate jdbc) {
            this.jdbc = jdbc;
        }

        @Transactional
        public void take(Order order) {
            if (jdbc.update("insert into processed (message_id) values (?) on conflict do nothing", order.messageId()) == 0) return;
            jdbc.update("insert into effects (message_id, order_no) values (?, ?)", order.messageId(), order.orderNo());
        }
    }

    @Component
    static class Listener {
        private final Orders orders;
        private final long expect;
        private final ObjectMapper mapper = JsonMapper.builder().build();
        private final AtomicLong seen = new AtomicLong();
        private volatile long first, half;

        Listener(Orders orders, @Value("${bench.expect}") long expect) {
            this.orders = orders;
            this.expect = expect;
        }

        @KafkaListener(topics = "${bench.topic}", groupId = "${bench.group}", concurrency = "3")
        public void consume(String json) {
            orders.take(mapper.readValue(json, Order.class));
            long n = seen.incrementAndGet();
            if (n == 1) first = System.nanoTime();
            if (n == expect / 2) half = System.nanoTime();
            if (n != expect) return;
            long now = System.nanoTime();
            long cpu = ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
            System.err.printf("RESULT {\"messages\": %d, \"whole_per_second\": %.1f, \"per_second\": %.1f, \"cpu_us\": %.1f}%n",
                    n, n / ((now - first) / 1e9), (n - n / 2) / ((now - half) / 1e9), cpu / 1e3 / n);
            new Thread(() -> Runtime.getRuntime().halt(0)).start();
        }
    }
}
