import java.io.FileDescriptor;
import java.io.RandomAccessFile;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import java.util.zip.ZipEntry;
import java.util.zip.ZipFile;
import java.util.zip.ZipInputStream;
import org.antigravity.AntigravityException;
import org.antigravity.Model;

/**
 * Promises of the class in the Android archive, for `cargo xtask test aar`. Prints `ok NAME` or `not ok NAME: why`.
 *
 * <p>Check.java PROGRAM MODEL ARCHIVE OFFSET LENGTH SCRATCH
 */
public class Check {
    static final String PROMPT = "Once upon a time";
    static final String TALK = "[{\"role\": \"user\", \"content\": \"Tell me of a dog.\"}]";
    static final String GREEDY = "{\"num_tokens\": 60, \"temperature\": 0}";
    static final String ENDLESS = "{\"num_tokens\": -1, \"ignore_eos\": true, \"seed\": 1}";
    static String program, modelPath;

    static void promise(String name, boolean holds, Object why) {
        System.out.println(holds ? "ok " + name : "not ok " + name + ": " + String.valueOf(why).replace('\n', ' '));
    }

    static String run(String... words) throws Exception {
        List<String> command = new ArrayList<>(List.of(program));
        command.addAll(List.of(words));
        command.addAll(List.of("-q", "--temperature=0", "--model-path", modelPath));
        ProcessBuilder process = new ProcessBuilder(command).redirectError(ProcessBuilder.Redirect.INHERIT);
        String out = new String(process.start().getInputStream().readAllBytes(), StandardCharsets.UTF_8);
        return out.substring(0, out.length() - 1);
    }

    static String read(Stream<String> pieces) {
        try (Stream<String> all = pieces) {
            return all.collect(Collectors.joining());
        }
    }

    static void refuse(String name, int status, String words, Runnable call) {
        try {
            call.run();
            promise(name + " is refused", false, "no exception");
        } catch (AntigravityException e) {
            boolean isLine = !e.getMessage().isEmpty() && e.getMessage().lines().count() == 1;
            promise(name + " is refused", e.status == status && e.getMessage().contains(words) && isLine, e);
        }
    }

    public static void main(String[] args) throws Exception {
        Thread watchdog = new Thread(() -> {
            try {
                Thread.sleep(300_000);
            } catch (InterruptedException e) {
                return;
            }
            promise("no call blocks", false, "5 minutes");
            Runtime.getRuntime().halt(1);
        });
        watchdog.setDaemon(true);
        watchdog.start();
        program = args[0];
        modelPath = args[1];
        checkArchive(args[2]);
        Model model;
        // On Android, AssetFileDescriptor has these three numbers.
        try (RandomAccessFile archive = new RandomAccessFile(args[2], "r")) {
            Field fd = FileDescriptor.class.getDeclaredField("fd");
            fd.setAccessible(true);
            long offset = Long.parseLong(args[3]), length = Long.parseLong(args[4]);
            model = Model.load(fd.getInt(archive.getFD()), offset, length, "{\"max_seq_len\": 512}");
        }
        checkTexts(model);
        checkLeaving(model, args[5]);
        checkCancelling(model);
        checkErrors(model);
        checkClosing(model);
    }

    static void checkArchive(String path) throws Exception {
        try (ZipFile archive = new ZipFile(path)) {
            List<String> names = archive.stream().map(ZipEntry::getName).sorted().collect(Collectors.toList());
            promise("the archive has what Android wants", names.equals(List.of("AndroidManifest.xml", "R.txt",
                    "assets/story.bundle", "classes.jar", "jni/arm64-v8a/libantigravity.so", "proguard.txt")), names);
            boolean isStored = archive.stream().allMatch(entry -> entry.getMethod() == ZipEntry.STORED);
            promise("nothing in it is compressed", isStored, names);
            byte[] manifest = archive.getInputStream(archive.getEntry("AndroidManifest.xml")).readAllBytes();
            String text = new String(manifest, StandardCharsets.UTF_8);
            promise("Android 7 takes it", text.contains("android:minSdkVersion=\"24\""), text);
            ZipInputStream classes = new ZipInputStream(archive.getInputStream(archive.getEntry("classes.jar")));
            int count = 0;
            for (ZipEntry entry = classes.getNextEntry(); entry != null; entry = classes.getNextEntry()) {
                // Byte 7 of a class is its version: 52 is Java 8.
                boolean isOld = classes.readAllBytes()[7] == 52;
                count += isOld && entry.getName().startsWith("org/antigravity/") ? 1 : 1000;
            }
            promise("its classes are of Java 8", count > 5 && count < 1000, count);
        }
    }

    static void checkTexts(Model model) throws Exception {
        String text = run("generate", "-p", PROMPT, "-n", "60");
        String answer = run("chat", "-p", "Tell me of a dog.", "--single-turn", "-n", "60");
        promise("the model is told", Model.info().contains("\"model\":\"story\""), Model.info());
        try (Model.Session session = model.newSession()) {
            String streamed = read(session.generate(PROMPT, GREEDY));
            promise("a stream has the program's text", streamed.equals(text), streamed);
            List<String> pieces = new ArrayList<>();
            Model.Result result = session.chat(TALK, GREEDY, (kind, piece) -> pieces.add(piece));
            promise("a listener gets the program's answer", String.join("", pieces).equals(answer), pieces);
            promise("in pieces", pieces.size() > 5, pieces);
            boolean counted = result.tokens > 5 && result.promptTokens > 5 && result.decodingMicros > 0;
            promise("numbers of a text are told", counted && result.stopReason <= 2, result.tokens);
            promise("a session goes on with another text", read(session.chat(TALK, GREEDY)).equals(answer), answer);
        }
        try (Model other = Model.load(modelPath, null); Model.Session session = other.newSession()) {
            // Java's own UTF-8 has other bytes for it.
            String forced = "{\"num_tokens\": 30, \"json_schema\": {\"const\": \"\uD83D\uDC15 \u00E9\"}}";
            String emoji = read(session.generate("A dog \uD83D\uDC15", forced));
            promise("a text beyond the basic plane is whole", emoji.equals("\"\uD83D\uDC15 \u00E9\""), emoji);
        }
    }

    static void checkLeaving(Model model, String scratch) throws Exception {
        String text = run("generate", "-p", PROMPT, "-n", "60");
        try (Model.Session session = model.newSession(); Model.Session second = model.newSession()) {
            String begun;
            try (Stream<String> pieces = session.generate(PROMPT, GREEDY)) {
                begun = pieces.limit(9).collect(Collectors.joining());
            }
            session.save(scratch);
            second.load(scratch);
            String rest = read(session.generate(null, GREEDY));
            promise("a text that was left goes on", (begun + rest).startsWith(text), begun + "|" + rest);
            promise("so does a saved one", read(second.generate(null, GREEDY)).equals(rest), rest);
            Files.delete(Path.of(scratch));
            RuntimeException own = new IllegalStateException("enough");
            try {
                session.generate(PROMPT, GREEDY, (kind, piece) -> {
                    throw own;
                });
                promise("a listener's exception ends the text", false, "no exception");
            } catch (IllegalStateException e) {
                promise("a listener's exception ends the text", e == own, e);
            }
            promise("and the session is usable", read(session.generate(PROMPT, GREEDY)).equals(text), text);
        }
    }

    static void checkCancelling(Model model) throws Exception {
        try (Model endless = Model.load(modelPath,
                "{\"max_seq_len\": 256, \"eviction_policy\": \"sliding\", \"eviction_window\": 128}");
                Model.Session session = endless.newSession()) {
            CountDownLatch begun = new CountDownLatch(3);
            Thread canceller = new Thread(() -> {
                try {
                    begun.await();
                } catch (InterruptedException e) {
                    return;
                }
                session.cancel();
            });
            canceller.start();
            Model.Result result = session.generate(PROMPT, ENDLESS, (kind, piece) -> begun.countDown());
            promise("another thread cancels a text without end", result.stopReason == 4, result.stopReason);
            result = session.generate(PROMPT, ENDLESS, (kind, piece) -> session.cancel());
            promise("so does the listener", result.stopReason == 4 && result.tokens <= 2, result.tokens);
            refuse("a thread's interruption", 130, "interrupted", () ->
                    session.generate(PROMPT, ENDLESS, (kind, piece) -> Thread.currentThread().interrupt()));
            promise("and remembered", Thread.interrupted(), "not interrupted");
            Stream<String> pieces = session.generate(PROMPT, ENDLESS);
            Iterator<String> left = pieces.iterator();
            left.next();
            refuse("a second text at the same time", 2, "used by another call", () -> read(session.generate(PROMPT, GREEDY)));
            session.close();
            while (left.hasNext()) {
                left.next();
            }
            promise("closing a session ends its text", true, "");
        }
    }

    static void checkErrors(Model model) {
        try (Model.Session session = model.newSession()) {
            refuse("an unknown option", 2, "--temperatur", () -> read(session.generate(PROMPT, "{\"temperatur\": 0}")));
            refuse("a missing model", 3, "/no/such/\uD83D\uDC15", () -> Model.load("/no/such/\uD83D\uDC15", null));
            refuse("options that are no JSON", 2, "JSON", () -> Model.load(modelPath, "max_seq_len"));
            refuse("a closed descriptor", 2, "descriptor", () -> Model.load(9999, 0, 0, null));
            refuse("a missing session", 3, "no such file", () -> session.load("/no/such"));
            refuse("a broken conversation", 2, "robot", () ->
                    session.chat("[{\"role\": \"robot\", \"content\": \"\"}]", null, (kind, piece) -> {}));
        }
    }

    static void checkClosing(Model model) throws Exception {
        Model.Session session = model.newSession();
        model.close();
        model.close();
        refuse("a closed model", 2, "was it freed", model::newSession);
        String text = read(session.generate(PROMPT, GREEDY));
        promise("a session outlives its model", text.length() > 20, text);
        Stream<String> unread = session.generate(PROMPT, GREEDY);
        unread.close();
        session.close();
        session.close();
        refuse("a closed session", 2, "was it freed", () -> read(session.generate(PROMPT, GREEDY)));
        long threads = countThreads();
        for (int wait = 0; threads > 0 && wait < 100; wait++) {
            Thread.sleep(20);
            threads = countThreads();
        }
        promise("no thread is left", threads == 0, threads);
    }

    static long countThreads() {
        return Thread.getAllStackTraces().keySet().stream().filter(t -> t.getName().equals("antigravity")).count();
    }
}
