import com.zaxxer.hikari.HikariConfig;
import com.zaxxer.hikari.HikariDataSource;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.UUID;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import org.springframework.integration.jdbc.metadata.JdbcMetadataStore;
import org.springframework.jdbc.core.JdbcTemplate;

/**
 * Spring Integration's JdbcMetadataStore behind HikariCP: calls a second.
 *
 * <p>SpringStore JDBC_URL USER PASSWORD new|duplicate THREADS SECONDS
 *
 * <p>`new`: putIfAbsent of a key of its own, then replace with 1 KiB. `duplicate`: putIfAbsent of one that has its 1 KiB. A
 * second of warm-up goes before. Prints {"operations":n,"per_second":x}.
 */
public final class SpringStore {
    private static final String ANSWER = "x".repeat(1024);

    private interface Call {
        void make() throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        String kind = arguments[3];
        int threads = Integer.parseInt(arguments[4]);
        double seconds = Double.parseDouble(arguments[5]);
        HikariConfig config = new HikariConfig();
        config.setJdbcUrl(arguments[0]);
        config.setUsername(arguments[1]);
        config.setPassword(arguments[2]);
        config.setMaximumPoolSize(threads);
        try (HikariDataSource source = new HikariDataSource(config)) {
            makeTable(new JdbcTemplate(source));
            JdbcMetadataStore store = new JdbcMetadataStore(source);
            store.afterPropertiesSet();
            store.start();
            Call call = kind.equals("duplicate") ? duplicate(store) : fresh(store);
            run(call, threads, 1.0);
            long begin = System.nanoTime();
            long done = run(call, threads, seconds);
            double elapsed = (System.nanoTime() - begin) / 1e9;
            System.out.printf(Locale.ROOT, "{\"operations\":%d,\"per_second\":%.1f}%n", done, done / elapsed);
        }
    }

    /** As Spring's own scripts make it; without a collation that folds. */
    private static void makeTable(JdbcTemplate template) {
        template.execute("DROP TABLE IF EXISTS INT_METADATA_STORE");
        template.execute("CREATE TABLE INT_METADATA_STORE (METADATA_KEY VARCHAR(255) NOT NULL, METADATA_VALUE VARCHAR(4000),"
            + " REGION VARCHAR(100) NOT NULL, CONSTRAINT INT_METADATA_STORE_PK PRIMARY KEY (METADATA_KEY, REGION))");
    }

    private static Call fresh(JdbcMetadataStore store) {
        return () -> {
            String key = UUID.randomUUID().toString();
            if (store.putIfAbsent(key, "P") != null) throw new IllegalStateException("a new key was there");
            if (!store.replace(key, "P", ANSWER)) throw new IllegalStateException("a call was not completed");
        };
    }

    private static Call duplicate(JdbcMetadataStore store) {
        String key = UUID.randomUUID().toString();
        store.putIfAbsent(key, ANSWER);
        return () -> {
            if (!ANSWER.equals(store.putIfAbsent(key, "P"))) throw new IllegalStateException("another answer");
        };
    }

    private static long run(Call call, int threads, double seconds) throws Exception {
        AtomicLong done = new AtomicLong();
        AtomicReference<Exception> failed = new AtomicReference<>();
        long end = System.nanoTime() + (long) (seconds * 1e9);
        List<Thread> all = new ArrayList<>();
        for (int i = 0; i < threads; i++) {
            Thread thread = new Thread(() -> {
                try {
                    while (System.nanoTime() < end) {
                        call.make();
                        done.incrementAndGet();
                    }
                } catch (Exception failure) {
                    failed.set(failure);
                }
            });
            all.add(thread);
            thread.start();
        }
        for (Thread thread : all) thread.join();
        if (failed.get() != null) throw failed.get();
        return done.get();
    }
}
