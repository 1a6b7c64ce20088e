import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.sql.Array;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Semaphore;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.storm.Config;
import org.apache.storm.LocalCluster;
import org.apache.storm.task.IMetricsContext;
import org.apache.storm.task.TopologyContext;
import org.apache.storm.trident.TridentTopology;
import org.apache.storm.trident.operation.BaseFunction;
import org.apache.storm.trident.operation.TridentCollector;
import org.apache.storm.trident.operation.builtin.Count;
import org.apache.storm.trident.spout.ITridentSpout;
import org.apache.storm.trident.state.State;
import org.apache.storm.trident.state.StateFactory;
import org.apache.storm.trident.state.TransactionalValue;
import org.apache.storm.trident.state.map.IBackingMap;
import org.apache.storm.trident.state.map.TransactionalMap;
import org.apache.storm.trident.topology.TransactionAttempt;
import org.apache.storm.trident.tuple.TridentTuple;
import org.apache.storm.tuple.Fields;
import org.apache.storm.tuple.Values;

/**
 * Trident's word count: one file of lines per transaction, counted into a transactional map of a Postgres table.
 *
 * <p>Arguments: the JDBC address and the table, with columns word, txid and count. Each line of standard input is a file, an empty
 * one ends a round; the answer is its seconds, from the first file to the commit of the last.
 */
public final class TridentWords {
    private static final int TASKS = 2;
    private static final Pattern WORD = Pattern.compile("\\p{L}+(?:'\\p{L}+)*");
    // The cluster runs in this process, so its spouts see these.
    private static final Map<Long, String> FILES = new ConcurrentHashMap<>();
    private static final Semaphore COMMITTED = new Semaphore(0);

    private TridentWords() {}

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        TridentTopology topology = new TridentTopology();
        topology.newStream("lines", new Lines())
                .parallelismHint(TASKS)
                .each(new Fields("line"), new Split(), new Fields("word"))
                .groupBy(new Fields("word"))
                .persistentAggregate(new Table.Factory(arguments[0], arguments[1]), new Count(), new Fields("count"))
                .parallelismHint(TASKS);
        Config configuration = new Config();
        configuration.setMaxSpoutPending(3);
        configuration.setMessageTimeoutSecs(600);
        configuration.put(Config.TOPOLOGY_TRIDENT_BATCH_EMIT_INTERVAL_MILLIS, 1);
        try (LocalCluster cluster = new LocalCluster();
                LocalCluster.LocalTopology running = cluster.submitTopology("words", configuration, topology.build());
                BufferedReader requests = new BufferedReader(new InputStreamReader(System.in))) {
            List<String> files = new ArrayList<>();
            long given = 0;
            for (String line = requests.readLine(); line != null; line = requests.readLine()) {
                if (!line.isEmpty()) {
                    files.add(line);
                    continue;
                }
                long start = System.nanoTime();
                for (String file : files) {
                    FILES.put(++given, file);
                }
                COMMITTED.acquire(files.size());
                answers.println((System.nanoTime() - start) / 1e9);
                files.clear();
            }
        }
        System.exit(0); // some of Storm's threads would go on
    }

    /** A file per transaction; each task emits its share of the lines, the same ones whenever the transaction is repeated. */
    private static final class Lines implements ITridentSpout<String> {
        @Override
        public BatchCoordinator<String> getCoordinator(String id, Map<String, Object> configuration, TopologyContext context) {
            return new BatchCoordinator<>() {
                @Override
                public String initializeTransaction(long txid, String previous, String current) {
                    return current == null ? FILES.get(txid) : current;
                }

                @Override
                public void success(long txid) {
                    COMMITTED.release();
                }

                @Override
                public boolean isReady(long txid) {
                    return FILES.containsKey(txid);
                }

                @Override
                public void close() {}
            };
        }

        @Override
        public Emitter<String> getEmitter(String id, Map<String, Object> configuration, TopologyContext context) {
            int task = context.getThisTaskIndex();
            int tasks = context.getComponentTasks(context.getThisComponentId()).size();
            return new Emitter<>() {
                @Override
                public void emitBatch(TransactionAttempt attempt, String file, TridentCollector collector) {
                    try (BufferedReader lines = Files.newBufferedReader(Path.of(file))) {
                        int number = 0;
                        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                            if (number++ % tasks == task) {
                                collector.emit(new Values(line));
                            }
                        }
                    } catch (java.io.IOException failed) {
                        throw new IllegalStateException(failed);
                    }
                }

                @Override
                public void success(TransactionAttempt attempt) {}

                @Override
                public void close() {}
            };
        }

        @Override
        public Map<String, Object> getComponentConfiguration() {
            return null;
        }

        @Override
        public Fields getOutputFields() {
            return new Fields("line");
        }
    }

    private static final class Split extends BaseFunction {
        @Override
        public void execute(TridentTuple line, TridentCollector collector) {
            Matcher words = WORD.matcher(line.getString(0).toLowerCase(java.util.Locale.ROOT));
            while (words.find()) {
                collector.emit(new Values(words.group()));
            }
        }
    }

    /** The rows of one task's words: all of a transaction are read by one statement, and written by one. */
    private static final class Table implements IBackingMap<TransactionalValue> {
        private final Connection connection;
        private final String select;
        private final String upsert;

        private Table(String address, String name) throws SQLException {
            connection = DriverManager.getConnection(address);
            connection.setAutoCommit(false);
            select = "SELECT word, txid, count FROM " + name + " WHERE word = ANY (?)";
            upsert = "INSERT INTO " + name + " SELECT * FROM unnest(?, ?, ?) ORDER BY 1"
                    + " ON CONFLICT (word) DO UPDATE SET txid = excluded.txid, count = excluded.count";
        }

        @Override
        public List<TransactionalValue> multiGet(List<List<Object>> keys) {
            Map<String, TransactionalValue> found = new HashMap<>(keys.size() * 2);
            try (PreparedStatement statement = connection.prepareStatement(select)) {
                statement.setArray(1, words(keys));
                try (ResultSet rows = statement.executeQuery()) {
                    while (rows.next()) {
                        found.put(rows.getString(1), new TransactionalValue<>(rows.getLong(2), rows.getLong(3)));
                    }
                }
                connection.commit();
            } catch (SQLException failed) {
                throw new IllegalStateException(failed);
            }
            List<TransactionalValue> values = new ArrayList<>(keys.size());
            keys.forEach(key -> values.add(found.get((String) key.get(0))));
            return values;
        }

        @Override
        public void multiPut(List<List<Object>> keys, List<TransactionalValue> values) {
            try (PreparedStatement statement = connection.prepareStatement(upsert)) {
                statement.setArray(1, words(keys));
                statement.setArray(2, connection.createArrayOf("bigint", values.stream().map(v -> v.getTxid()).toArray()));
                statement.setArray(3, connection.createArrayOf("bigint", values.stream().map(v -> v.getVal()).toArray()));
                statement.executeUpdate();
                connection.commit();
            } catch (SQLException failed) {
                throw new IllegalStateException(failed);
            }
        }

        private Array words(List<List<Object>> keys) throws SQLException {
            return connection.createArrayOf("text", keys.stream().map(key -> key.get(0)).toArray());
        }

        private record Factory(String address, String name) implements StateFactory {
            @Override
            public State makeState(Map<String, Object> configuration, IMetricsContext metrics, int task, int tasks) {
                try {
                    return TransactionalMap.build(new Table(address, name));
                } catch (SQLException failed) {
                    throw new IllegalStateException(failed);
                }
            }
        }
    }
}
