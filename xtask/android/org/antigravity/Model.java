package org.antigravity;

import static java.nio.charset.StandardCharsets.UTF_8;

import androidx.annotation.NonNull;
import androidx.annotation.Nullable;
import java.util.Spliterators;
import java.util.function.Consumer;
import java.util.stream.Stream;
import java.util.stream.StreamSupport;

/**
 * A loaded language model. Any thread may use it; calls return when they are done, so call from a background thread.
 *
 * <p>Options are JSON objects whose fields are the flags of `antigravity generate` with underscores, such as
 * {"max_seq_len": 4096} to load a model and {"num_tokens": 100, "temperature": 0} for a text; null takes the defaults.
 * Failures are thrown as {@link AntigravityException}.
 */
public final class Model implements AutoCloseable {
    /** Stack in bytes for a call: four times what the library asks for. */
    private static final long STACK = 8 << 20;

    private static final int CANCELLED = 130;

    static {
        System.loadLibrary("antigravity");
    }

    private final long handle;
    private boolean closed;

    private Model(long handle) {
        this.handle = handle;
    }

    /** Loads a model: a directory, a .gguf file, a packed file or a bundle. */
    public static @NonNull Model load(@NonNull String path, @Nullable String options) {
        byte[][] texts = {encode(path), encode(options)};
        return new Model(new Call(null, (call, out) -> loadPath(texts[0], texts[1], out)).finish()[0]);
    }

    /**
     * Loads a model from a part of an open file, such as an asset that is stored uncompressed. A length of 0 means to the
     * end of the file. The descriptor may be closed afterwards.
     */
    public static @NonNull Model load(int fd, long offset, long length, @Nullable String options) {
        byte[] text = encode(options);
        return new Model(new Call(null, (call, out) -> loadDescriptor(fd, offset, length, text, out)).finish()[0]);
    }

    /** Facts about the model that the library is built for, as a JSON object. */
    public static @NonNull String info() {
        return new String(modelInfo(), UTF_8);
    }

    /** Makes an empty session. Several sessions of a model can be used at the same time. */
    public @NonNull Session newSession() {
        return new Session(new Call(null, (call, out) -> newSession(handle, out)).finish()[0]);
    }

    /** Frees the model. Its sessions stay usable, and keep its memory until they are closed. */
    @Override
    public synchronized void close() {
        if (!closed) {
            closed = true;
            check(freeModel(handle));
        }
    }

    /** Receives the pieces of a text, on the thread that asked for it. What it throws ends the text. */
    public interface PieceListener {
        int TEXT = 0;
        /** A piece of a reasoning model's thoughts. */
        int THOUGHT = 1;
        /** A whole tool call: a JSON object with id, name and arguments. */
        int TOOL_CALL = 2;

        void onPiece(int kind, @NonNull String piece);
    }

    /** End and numbers of a text. */
    public static final class Result {
        /** 0: the model ended the text, 1: a stop string, 2: its length, 3: the context is full, 4: cancelled. */
        public final int stopReason;
        /** Number of prompt tokens that had to be computed. */
        public final long promptTokens;
        public final long tokens;
        public final long firstTokenMicros;
        public final long decodingMicros;
        /** Seed of the random numbers, which gives the same text again. */
        public final long seed;

        private Result(long[] out) {
            stopReason = (int) out[0];
            promptTokens = out[1];
            tokens = out[2];
            firstTokenMicros = out[3];
            decodingMicros = out[4];
            seed = out[5];
        }
    }

    /**
     * One text or conversation, which keeps what it has computed: give it the whole prompt or all messages each time. Only
     * one text at a time; another one is an error.
     */
    public static final class Session implements AutoCloseable {
        private final long handle;
        private Call running;
        private boolean closed;

        private Session(long handle) {
            this.handle = handle;
        }

        /**
         * Completes a prompt; null continues the text where it stopped. The text is generated as the stream is read. Close
         * the stream if it is not read to its end.
         */
        public @NonNull Stream<String> generate(@Nullable String prompt, @Nullable String options) {
            return startText(prompt, options).stream();
        }

        /** Completes a prompt as {@link #generate(String, String)}, for a listener. */
        public @NonNull Result generate(
                @Nullable String prompt, @Nullable String options, @NonNull PieceListener listener) {
            return startText(prompt, options).tell(listener);
        }

        /**
         * Answers a conversation: a JSON array of messages such as {"role": "user", "content": "Hi"}. Options may also have
         * `tools` and `chat_template_kwargs`. The stream has the answer's text without thoughts and tool calls.
         */
        public @NonNull Stream<String> chat(@NonNull String messages, @Nullable String options) {
            return startAnswer(messages, options).stream();
        }

        /** Answers a conversation as {@link #chat(String, String)}, for a listener, which also gets thoughts and tool calls. */
        public @NonNull Result chat(
                @NonNull String messages, @Nullable String options, @NonNull PieceListener listener) {
            return startAnswer(messages, options).tell(listener);
        }

        /** Ends the text that is being generated, if any; any thread may call this. The text can be continued. */
        public void cancel() {
            Call call = find(null);
            if (call != null) {
                call.stop();
            }
            check(cancelSession(handle));
        }

        /** Saves the session to a file, which holds either the old or the new content. */
        public void save(@NonNull String path) {
            byte[] text = encode(path);
            new Call(null, (call, out) -> saveSession(handle, text)).finish();
        }

        /** Replaces the session by the one in a file. Sessions that load the same file share its memory. */
        public void load(@NonNull String path) {
            byte[] text = encode(path);
            new Call(null, (call, out) -> loadSession(handle, text)).finish();
        }

        /** Ends the text that is being generated, and frees the session. */
        @Override
        public void close() {
            Call call = find(null);
            if (call != null) {
                call.leave();
            }
            synchronized (this) {
                if (!closed) {
                    closed = true;
                    check(freeSession(handle));
                }
            }
        }

        private Call startText(String prompt, String options) {
            byte[][] texts = {encode(prompt), encode(options)};
            return new Call(this, (call, out) -> Model.generate(handle, texts[0], texts[1], call, out));
        }

        private Call startAnswer(String messages, String options) {
            byte[][] texts = {encode(messages), encode(options)};
            return new Call(this, (call, out) -> Model.chat(handle, texts[0], texts[1], call, out));
        }

        /** The call under way, which is the given one if there is none. */
        private synchronized Call find(Call begun) {
            if (running == null || running.ended) {
                running = begun;
            }
            return running;
        }
    }

    /** A call of the library, which receives its pieces and writes its results. */
    private interface Body {
        int run(Call call, long[] out);
    }

    /** A call on a thread of its own, whose stack is large enough. It waits while a piece is used. */
    private static final class Call extends Spliterators.AbstractSpliterator<String> {
        private final Session session;
        private final Body body;
        private final long[] out = new long[6];
        private boolean started, wanted, left;
        private volatile boolean ended;
        private int kind;
        private String piece;
        private Throwable failure;

        Call(Session session, Body body) {
            super(Long.MAX_VALUE, ORDERED | NONNULL);
            this.session = session;
            this.body = body;
        }

        Stream<String> stream() {
            return StreamSupport.stream(this, false).onClose(this::leave);
        }

        @Override
        public boolean tryAdvance(Consumer<? super String> action) {
            while (next()) {
                if (kind == PieceListener.TEXT) {
                    action.accept(piece);
                    return true;
                }
            }
            return false;
        }

        Result tell(PieceListener listener) {
            try {
                while (next()) {
                    listener.onPiece(kind, piece);
                }
            } finally {
                leave();
            }
            return new Result(out);
        }

        long[] finish() {
            next();
            return out;
        }

        /** Takes the next piece; false after the last one. */
        private synchronized boolean next() {
            start();
            piece = null;
            wanted = true;
            notifyAll();
            if (await(session != null)) {
                leave();
                throw new AntigravityException(CANCELLED, "the thread was interrupted, which cancelled the text");
            }
            if (piece == null && failure instanceof Error) {
                throw (Error) failure;
            } else if (piece == null && failure != null) {
                failure.fillInStackTrace();
                throw (RuntimeException) failure;
            }
            return piece != null;
        }

        private void start() {
            if (!started) {
                started = true;
                if (session != null) {
                    session.find(this);
                }
                Thread thread = new Thread(null, this::work, "antigravity", STACK);
                thread.setDaemon(true);
                thread.start();
            }
        }

        private void work() {
            try {
                check(body.run(this, out));
            } catch (RuntimeException | Error e) {
                failure = e;
            }
            synchronized (this) {
                ended = true;
                notifyAll();
            }
        }

        /** Waits for a piece or the end; true if the thread was interrupted, which ends the wait where that is asked for. */
        private boolean await(boolean untilInterrupted) {
            boolean interrupted = false;
            while (piece == null && !ended && !(interrupted && untilInterrupted)) {
                try {
                    wait();
                } catch (InterruptedException e) {
                    interrupted = true;
                }
            }
            if (interrupted) {
                Thread.currentThread().interrupt();
            }
            return interrupted && untilInterrupted;
        }

        /** Takes a piece from the library. Returns 1 if it is the last one that is wanted. */
        private synchronized int accept(int kind, byte[] text) throws InterruptedException {
            this.kind = kind;
            piece = new String(text, UTF_8);
            wanted = false;
            notifyAll();
            while (!wanted && !left) {
                wait();
            }
            return left ? 1 : 0;
        }

        /** Lets the library's next piece be its last. */
        synchronized void stop() {
            left = true;
            notifyAll();
        }

        /** Ends the call, and waits for its end. */
        void leave() {
            boolean interrupted = false;
            synchronized (this) {
                stop();
                ended |= !started;
                started = true;
                while (!ended) {
                    // Again, as a call that begins forgets an earlier cancellation.
                    cancelSession(session.handle);
                    try {
                        wait(20);
                    } catch (InterruptedException e) {
                        interrupted = true;
                    }
                }
            }
            if (interrupted) {
                Thread.currentThread().interrupt();
            }
        }
    }

    private static byte[] encode(String text) {
        return text == null ? null : text.getBytes(UTF_8);
    }

    private static void check(int status) {
        if (status != 0) {
            throw new AntigravityException(status, new String(lastError(), UTF_8));
        }
    }

    private static native byte[] lastError();

    private static native byte[] modelInfo();

    private static native int loadPath(byte[] path, byte[] options, long[] out);

    private static native int loadDescriptor(int fd, long offset, long length, byte[] options, long[] out);

    private static native int freeModel(long model);

    private static native int newSession(long model, long[] out);

    private static native int freeSession(long session);

    private static native int cancelSession(long session);

    private static native int saveSession(long session, byte[] path);

    private static native int loadSession(long session, byte[] path);

    private static native int generate(long session, byte[] prompt, byte[] options, Call receiver, long[] out);

    private static native int chat(long session, byte[] messages, byte[] options, Call receiver, long[] out);
}
