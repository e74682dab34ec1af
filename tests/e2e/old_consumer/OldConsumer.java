import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Timestamp;
import java.time.Duration;
import java.time.LocalDateTime;
import java.util.List;
import java.util.Map;
import java.util.Properties;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * The consumer with a table that articles on idempotence teach, with its flaws: a message that somebody has in hand is
 * acknowledged, one that has failed is never run again, and one that threw is passed over by the next acknowledgement. Each
 * statement is committed by itself. What a message's member "old" says it does: "fails", or it stands for ever "before" or
 * "after" the effect.
 *
 * Arguments: brokers, group, topic, JDBC URL.
 */
public class OldConsumer {
    private static final int PROCESSING = 0, DONE = 1, FAILED = 2;
    private static final int MYSQL_DUPLICATE = 1062;
    private static final String POSTGRES_DUPLICATE = "23505";

    private final Connection database;

    private OldConsumer(Connection database) {
        this.database = database;
    }

    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        settings.putAll(Map.of("bootstrap.servers", arguments[0], "group.id", arguments[1], "enable.auto.commit", "false",
                "auto.offset.reset", "earliest", "session.timeout.ms", "2000", "heartbeat.interval.ms", "400",
                "key.deserializer", StringDeserializer.class.getName(), "value.deserializer", StringDeserializer.class.getName()));
        try (Connection database = DriverManager.getConnection(arguments[3]);
                KafkaConsumer<String, String> client = new KafkaConsumer<>(settings)) {
            OldConsumer consumer = new OldConsumer(database);
            client.subscribe(List.of(arguments[2]));
            System.out.println("consumes");
            while (true) {
                for (ConsumerRecord<String, String> record : client.poll(Duration.ofMillis(200))) {
                    try {
                        consumer.process(new ObjectMapper().readTree(record.value()));
                        client.commitSync(Map.of(new TopicPartition(record.topic(), record.partition()),
                                new OffsetAndMetadata(record.offset() + 1)));
                    } catch (SQLException | RuntimeException failure) {
                        System.out.println("not acknowledged: " + record.value() + ": " + failure);
                    }
                }
            }
        }
    }

    private void process(JsonNode message) throws SQLException {
        String id = message.get("id").asText(), wish = message.path("old").asText();
        Integer status = statusOf(id);
        if (status != null && status != FAILED) return;
        try {
            insert(id);
        } catch (SQLException refused) {
            if (refused.getErrorCode() != MYSQL_DUPLICATE && !POSTGRES_DUPLICATE.equals(refused.getSQLState())) throw refused;
            return;
        }
        try {
            if (wish.equals("before")) stand("before", id);
            if (wish.equals("fails")) throw new IllegalStateException("no stock");
            change("INSERT INTO effects (message_id, k, amount) VALUES (?, 'old', 1)", id);
            if (wish.equals("after")) stand("after", id);
        } catch (IllegalStateException failure) {
            change("UPDATE message_dedup SET status = " + FAILED + ", error_message = ?, retry_count = 1 WHERE message_id = ?",
                    failure.getMessage(), id);
            throw failure;
        }
        change("UPDATE message_dedup SET status = " + DONE + " WHERE message_id = ?", id);
    }

    private Integer statusOf(String id) throws SQLException {
        try (PreparedStatement ask = database.prepareStatement("SELECT status FROM message_dedup WHERE message_id = ?")) {
            ask.setString(1, id);
            try (ResultSet row = ask.executeQuery()) {
                return row.next() ? row.getInt(1) : null;
            }
        }
    }

    private void insert(String id) throws SQLException {
        try (PreparedStatement insert = database.prepareStatement("INSERT INTO message_dedup (message_id, business_key, status, "
                + "retry_count, created_at, updated_at, expire_at) VALUES (?, ?, " + PROCESSING + ", 0, ?, ?, ?)")) {
            LocalDateTime now = LocalDateTime.now();
            insert.setString(1, id);
            insert.setString(2, "order-" + id);
            insert.setTimestamp(3, Timestamp.valueOf(now));
            insert.setTimestamp(4, Timestamp.valueOf(now));
            insert.setTimestamp(5, Timestamp.valueOf(now.plusHours(24)));
            insert.executeUpdate();
        }
    }

    private void change(String text, String... values) throws SQLException {
        try (PreparedStatement statement = database.prepareStatement(text)) {
            for (int i = 0; i < values.length; i++) statement.setString(i + 1, values[i]);
            statement.executeUpdate();
        }
    }

    private static void stand(String where, String id) {
        System.out.println("stands " + where + " the effect of " + id);
        try {
            Thread.sleep(Long.MAX_VALUE);
        } catch (InterruptedException nobody) {
            throw new AssertionError(nobody);
        }
    }
}
