package bench;

import java.lang.management.ManagementFactory;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;

import org.springframework.beans.factory.annotation.Value;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.boot.jdbc.autoconfigure.DataSourceAutoConfiguration;
import org.springframework.context.annotation.Bean;
import org.springframework.data.redis.core.StringRedisTemplate;
import org.springframework.kafka.annotation.KafkaListener;
import org.springframework.kafka.config.ConcurrentKafkaListenerContainerFactory;
import org.springframework.kafka.core.ConsumerFactory;
import org.springframework.kafka.listener.ContainerProperties;
import org.springframework.kafka.support.Acknowledgment;
import tools.jackson.databind.ObjectMapper;
import tools.jackson.databind.json.JsonMapper;

/**
 * The consumer that articles on idempotence teach: SET NX of the message's id in Redis, the effect (here: a counter), SET of
 * its state, and an acknowledgement for each message; what fails is marked so and not acknowledged; concurrency 3. Prints its
 * rates when bench.expect messages were seen. With bench.effects its effects are also in a list of that name in Redis, where
 * they outlive it, and messages with a negative quantity fail the first time.
 */
@SpringBootApplication(exclude = DataSourceAutoConfiguration.class)
public class App {
    record Order(String messageId, String orderNo, int productId, int quantity, String pad) { }

    private static final long TTL_SECONDS = 86400;

    private final StringRedisTemplate redis;
    private final long expect;
    private final String list;
    private final ObjectMapper mapper = JsonMapper.builder().build();
    private final AtomicLong seen = new AtomicLong(), effects = new AtomicLong();
    private volatile long first, half;

    public App(StringRedisTemplate redis, @Value("${bench.expect}") long expect, @Value("${bench.effects:}") String list) {
        this.redis = redis;
        this.expect = expect;
        this.list = list;
    }

    public static void main(String[] args) {
        SpringApplication.run(App.class, args);
    }

    @Bean
    static ConcurrentKafkaListenerContainerFactory<String, String> eachAcknowledged(ConsumerFactory<String, String> consumers) {
        ConcurrentKafkaListenerContainerFactory<String, String> factory = new ConcurrentKafkaListenerContainerFactory<>();
        factory.setConsumerFactory(consumers);
        factory.setConcurrency(3);
        factory.getContainerProperties().setAckMode(ContainerProperties.AckMode.MANUAL_IMMEDIATE);
        return factory;
    }

    @KafkaListener(topics = "${bench.topic}", groupId = "${bench.group}", containerFactory = "eachAcknowledged")
    public void consume(String json, Acknowledgment acknowledgment) {
        Order order = mapper.readValue(json, Order.class);
        String key = "msg:dedup:" + order.messageId();
        if (Boolean.TRUE.equals(redis.opsForValue().setIfAbsent(key, "PROCESSING", TTL_SECONDS, TimeUnit.SECONDS))
                || !"PROCESSED".equals(redis.opsForValue().get(key))) {
            try {
                effect(order);
            } catch (IllegalStateException failure) {
                redis.opsForValue().set(key, "FAILED", TTL_SECONDS, TimeUnit.SECONDS);
                return;  // not acknowledged, in the belief that it comes again
            }
            redis.opsForValue().set(key, "PROCESSED", TTL_SECONDS, TimeUnit.SECONDS);
        }
        acknowledgment.acknowledge();
        count();
    }

    private void effect(Order order) {
        effects.incrementAndGet();
        if (list.isEmpty()) return;
        if (order.quantity() < 0 && Boolean.TRUE.equals(redis.opsForValue().setIfAbsent("failed:" + order.messageId(), "once")))
            throw new IllegalStateException("fails the first time");
        redis.opsForList().rightPush(list, order.messageId());
    }

    private void count() {
        long n = seen.incrementAndGet();
        if (n == 1) first = System.nanoTime();
        if (n == expect / 2) half = System.nanoTime();
        if (n != expect) return;
        long now = System.nanoTime();
        long cpu = ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
        System.err.printf("RESULT {\"messages\": %d, \"effects\": %d, \"whole_per_second\": %.1f, \"per_second\": %.1f, \"cpu_us\": %.1f}%n",
                n, effects.get(), n / ((now - first) / 1e9), (n - n / 2) / ((now - half) / 1e9), cpu / 1e3 / n);
        new Thread(() -> Runtime.getRuntime().halt(0)).start();
    }
}
