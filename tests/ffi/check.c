/* Promises of the C API, for `cargo xtask test library`. Prints `ok NAME` or `not ok NAME: why`.
 *     check MODEL ASSET SCRATCH LOADS
 * MODEL: a model's path. ASSET: a file with the bundle of that model from byte 4100 on. SCRATCH: a file to write.
 * LOADS: how many loads leave nothing behind; from 100 on, that includes resident memory. The library must have a model
 * inside. */
#include "antigravity.h"
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *GREEDY = "{\"num_tokens\": 24, \"temperature\": 0}";
static const char *SEEDED = "{\"num_tokens\": 24, \"seed\": 7}";
static const char *PROMPT = "Once upon a time";

static void promise(const char *name, int holds, const char *why) {
    if (holds) printf("ok %s\n", name);
    else printf("not ok %s: %s\n", name, why);
    fflush(stdout);
}

/* A text that is collected, and the number of pieces after which it is cancelled. */
typedef struct {
    char text[8192];
    size_t length;
    int pieces, most;
    antigravity_session *session;
    int32_t nested;
} collected;

static int32_t collect(int32_t kind, const char *piece, size_t length, void *user_data) {
    collected *all = user_data;
    (void)kind;
    if (all->length + length < sizeof all->text) memcpy(all->text + all->length, piece, length);
    all->length += length;
    all->text[all->length] = 0;
    all->pieces++;
    if (all->session) all->nested = antigravity_session_rewind(all->session, 0);
    return all->most && all->pieces >= all->most;
}

static int32_t generate(antigravity_session *s, const char *prompt, const char *options, collected *all,
        antigravity_result *r) {
    return antigravity_generate(s, prompt, prompt ? strlen(prompt) : 0, options, options ? strlen(options) : 0,
            collect, all, r);
}

static antigravity_engine *load(const char *model) {
    antigravity_engine *engine = NULL;
    const char *options = "{\"max_seq_len\": 256, \"threads\": 1}";
    int32_t status = antigravity_load(model, model ? strlen(model) : 0, options, strlen(options), &engine);
    if (status) fprintf(stderr, "%s\n", antigravity_last_error());
    return engine;
}

static antigravity_session *new_session(antigravity_engine *engine) {
    antigravity_session *session = NULL;
    if (antigravity_session_new(engine, &session)) fprintf(stderr, "%s\n", antigravity_last_error());
    return session;
}

static int count_entries(const char *folder) {
    int count = 0;
    DIR *dir = opendir(folder);
    while (dir && readdir(dir)) count++;
    if (dir) closedir(dir);
    return count;
}

static long resident_kib(void) {
    long pages = 0, ignored;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &ignored, &pages) != 2) pages = 0;
    if (file) fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static void load_often(int loads) {
    char why[200];
    long before = 0;
    int files = 0, threads = 0, broken = 0;
    for (int i = 0; i < loads; i++) {
        antigravity_engine *engine = load(NULL);
        antigravity_session *session = new_session(engine);
        collected all = {0};
        broken |= generate(session, PROMPT, "{\"num_tokens\": 1, \"temperature\": 0}", &all, NULL);
        broken |= antigravity_session_free(session) | antigravity_free(engine);
        if (i == loads / 10) before = resident_kib(), files = count_entries("/proc/self/fd"),
                threads = count_entries("/proc/self/task");
    }
    long growth = resident_kib() - before;
    int more_files = count_entries("/proc/self/fd") - files,
            more_threads = count_entries("/proc/self/task") - threads;
    snprintf(why, sizeof why, "%d loads: %ld KiB, %d files, %d threads more; failed: %d", loads, growth, more_files,
            more_threads, broken);
    fprintf(stderr, "%s\n", why);
    promise("many loads and unloads leave nothing behind", !broken && (loads < 100 || growth < 4096)
            && more_files <= 0 && more_threads <= 0, why);
}

typedef struct {
    antigravity_session *session;
    const char *options;
    collected all;
    antigravity_result result;
    int32_t status;
} job;

static void *run_job(void *data) {
    job *j = data;
    j->status = generate(j->session, PROMPT, j->options, &j->all, &j->result);
    return NULL;
}

static void run_threads(antigravity_engine *engine, const char *expected) {
    static job jobs[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        jobs[i] = (job){.session = new_session(engine), .options = GREEDY};
        pthread_create(&threads[i], NULL, run_job, &jobs[i]);
    }
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    int same = !strcmp(jobs[0].all.text, expected) && !strcmp(jobs[1].all.text, expected);
    promise("two sessions on two threads give the text of one", same && !jobs[0].status && !jobs[1].status,
            jobs[0].all.text);
    for (int i = 0; i < 2; i++) antigravity_session_free(jobs[i].session);
}

static void cancel_from_thread(const char *model) {
    const char *endless = "{\"max_seq_len\": 256, \"eviction_policy\": \"sliding\", \"eviction_window\": 128}";
    antigravity_engine *engine = NULL;
    antigravity_load(model, strlen(model), endless, strlen(endless), &engine);
    static job j;
    pthread_t thread;
    struct timespec wait = {0, 50000000}, began, ended;
    j = (job){.session = new_session(engine), .options = "{\"num_tokens\": -1, \"ignore_eos\": true, \"seed\": 1}"};
    pthread_create(&thread, NULL, run_job, &j);
    nanosleep(&wait, NULL);
    int32_t busy = antigravity_session_rewind(j.session, 0);
    clock_gettime(CLOCK_MONOTONIC, &began);
    int32_t status = antigravity_cancel(j.session);
    pthread_join(thread, NULL);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    double seconds = (ended.tv_sec - began.tv_sec) + (ended.tv_nsec - began.tv_nsec) / 1e9;
    char why[100];
    snprintf(why, sizeof why, "status %d, reason %d, %d tokens, %.3f s", j.status, j.result.stop_reason,
            (int)j.result.tokens, seconds);
    promise("another thread cancels a text", !status && !j.status
            && j.result.stop_reason == ANTIGRAVITY_STOP_CANCELLED && seconds < 1, why);
    promise("a session that is in use is refused", busy == ANTIGRAVITY_ERROR_USAGE, "rewound meanwhile");
    collected all = {0};
    antigravity_session_rewind(j.session, 0);
    promise("a cancelled session goes on", !generate(j.session, PROMPT, GREEDY, &all, NULL) && all.pieces > 10,
            all.text);
    antigravity_session_free(j.session), antigravity_free(engine);
}

static void refuse(const char *name, int32_t status, int32_t expected, const char *words) {
    char why[700];
    snprintf(why, sizeof why, "status %d, %s", status, antigravity_last_error());
    promise(name, status == expected && strstr(antigravity_last_error(), words), why);
}

static void refuse_bad_arguments(antigravity_engine *engine, const char *model) {
    antigravity_session *session = new_session(engine), *none = NULL, *other = new_session(engine);
    antigravity_engine *loaded = NULL;
    antigravity_memory memory;
    uint32_t ids[4], far[1] = {4000000000u};
    char text[4];
    size_t count = 0;
    collected all = {0};
    const int32_t usage = ANTIGRAVITY_ERROR_USAGE;
    refuse("a NULL engine", antigravity_session_new(NULL, &none), usage, "`engine` is NULL");
    refuse("a NULL place for a handle", antigravity_session_new(engine, NULL), usage, "`session` is NULL");
    refuse("a session as an engine", antigravity_session_new((antigravity_engine *)session, &none), usage,
            "was it freed?");
    refuse("a handle from nowhere", antigravity_free((antigravity_engine *)(size_t)12345), usage, "was it freed?");
    antigravity_session_free(other);
    refuse("a freed session", generate(other, PROMPT, NULL, &all, NULL), usage, "was it freed?");
    refuse("a session freed twice", antigravity_session_free(other), usage, "was it freed?");
    refuse("cancelling a freed session", antigravity_cancel(other), usage, "was it freed?");
    refuse("a NULL prompt of an empty session", generate(session, NULL, NULL, &all, NULL), usage,
            "no text to continue");
    refuse("a NULL prompt with a length", antigravity_generate(session, NULL, 3, NULL, 0, NULL, NULL, NULL), usage,
            "its length is 3");
    refuse("a prompt that is not UTF-8", antigravity_generate(session, "ab\xff", 3, NULL, 0, NULL, NULL, NULL),
            usage, "not UTF-8 from byte 2");
    refuse("a prompt longer than memory", antigravity_generate(session, "a", (size_t)-1, NULL, 0, NULL, NULL, NULL),
            usage, "`prompt`");
    refuse("a prompt that is too long", generate(session, PROMPT, "{\"num_tokens\": -2}", &all, NULL), usage,
            "--num-tokens -2");
    refuse("options that are not JSON", generate(session, PROMPT, "temperature", &all, NULL), usage,
            "not a JSON object");
    refuse("an array as options", generate(session, PROMPT, "[1]", &all, NULL), usage, "not a JSON object");
    refuse("an unknown option", generate(session, PROMPT, "{\"temperatur\": 0}", &all, NULL), usage, "--temperatur");
    refuse("a name that is no flag", generate(session, PROMPT, "{\"top k\": 0}", &all, NULL), usage,
            "\"top k\" is unknown");
    refuse("an option about output", generate(session, PROMPT, "{\"format\": \"jsonl\"}", &all, NULL), usage,
            "`format`");
    refuse("a value of the wrong type", generate(session, PROMPT, "{\"top_k\": \"many\"}", &all, NULL), usage,
            "--top-k");
    refuse("a broken grammar", generate(session, PROMPT, "{\"json_schema\": {\"type\": 3}}", &all, NULL), usage,
            "schema");
    refuse("messages that are not JSON", antigravity_chat(session, "hello", 5, NULL, 0, NULL, NULL, NULL), usage,
            "`messages`");
    refuse("no messages", antigravity_chat(session, "[]", 2, NULL, 0, NULL, NULL, NULL), usage,
            "`messages` is empty");
    const char *wrong = "[{\"role\": \"robot\", \"content\": \"\"}]",
            *user = "[{\"role\": \"user\", \"content\": \"Hi\"}]";
    refuse("an unknown role", antigravity_chat(session, wrong, strlen(wrong), NULL, 0, NULL, NULL, NULL), usage,
            "robot");
    refuse("tools of the wrong type", antigravity_chat(session, user, strlen(user), "{\"tools\": 3}", 12, NULL, NULL,
            NULL), usage, "`tools`");
    refuse("variables of the wrong type", antigravity_chat(session, user, strlen(user),
            "{\"chat_template_kwargs\": 3}", 27, NULL, NULL, NULL), usage, "is not an object");
    refuse("rewinding beyond the end", antigravity_session_rewind(session, 99), usage, "rewind to token 99");
    refuse("no buffer for tokens", antigravity_tokenize(engine, PROMPT, 16, 0, NULL, 4, &count), usage, "`buffer`");
    refuse("a buffer that is too small", antigravity_tokenize(engine, PROMPT, 16, 0, ids, 1, &count), usage,
            "has room for 1");
    promise("the needed size is told", count > 1 && count <= 16, "not told");
    refuse("no place for a count", antigravity_tokenize(engine, PROMPT, 16, 0, ids, 4, NULL), usage, "`count`");
    refuse("an unaligned buffer", antigravity_tokenize(engine, "a", 1, 0, (uint32_t *)((char *)ids + 1), 3, &count),
            usage, "aligned");
    refuse("an unknown token", antigravity_detokenize(engine, far, 1, text, 4, &count), usage,
            "4000000000 is not a token");
    refuse("scores of what are no texts", antigravity_score(engine, NULL, 0, "a", 1, NULL, 0, &count), usage, "`texts`");
    refuse("an empty path", antigravity_session_save(session, "", 0), usage, "`path` is empty");
    refuse("a file that is missing", antigravity_session_load(session, "/no/such/file", 13), ANTIGRAVITY_ERROR_MODEL,
            "no such file");
    refuse("a file that is no session", antigravity_session_load(session, "/proc/self/exe", 14),
            ANTIGRAVITY_ERROR_MODEL, "/proc/self/exe");
    refuse("a folder that cannot be written", antigravity_session_save(session, "/proc/x", 7), ANTIGRAVITY_ERROR,
            "/proc/x");
    refuse("a model that is missing", antigravity_load("/no/such", 8, NULL, 0, &loaded), ANTIGRAVITY_ERROR_MODEL,
            "/no/such");
    refuse("a file that is no model", antigravity_load("/proc/self/exe", 14, NULL, 0, &loaded),
            ANTIGRAVITY_ERROR_MODEL, "/proc/self/exe");
    refuse("an unknown option of a model", antigravity_load(model, strlen(model), "{\"slots\": 3}", 12, &loaded),
            usage, "--slots");
    setenv("ANTIGRAVITY_MEMORY_MIB", "10", 1);
    refuse("a model that does not fit", antigravity_load(model, strlen(model), NULL, 0, &loaded),
            ANTIGRAVITY_ERROR_MEMORY, "MiB");
    unsetenv("ANTIGRAVITY_MEMORY_MIB");
    refuse("no place for a plan", antigravity_plan(model, strlen(model), NULL, 0, NULL), usage, "`memory` is NULL");
    promise("a plan is told", !antigravity_plan(model, strlen(model), NULL, 0, &memory) && memory.needed > 1000000
            && memory.needed <= memory.available, antigravity_last_error());
    refuse("a closed descriptor", antigravity_load_fd(999, 0, 0, NULL, 0, &loaded), usage,
            "not an open file descriptor");
    refuse("a descriptor of a folder", antigravity_load_fd(open("/", O_RDONLY), 0, 0, NULL, 0, &loaded), usage,
            "not inside a regular file");
    refuse("a range outside of its file", antigravity_load_fd(open(model, O_RDONLY), 1, (uint64_t)-1, NULL, 0,
            &loaded), usage, "not inside");
    promise("NULL can be freed", !antigravity_free(NULL) && !antigravity_session_free(NULL), "refused");
    promise("no handle was written by a failed call", !loaded && !none, "written");
    promise("a session survives wrong calls", !generate(session, PROMPT, GREEDY, &all, NULL) && all.pieces > 10,
            antigravity_last_error());
    antigravity_session_free(session);
}

static void continue_texts(antigravity_engine *engine, const char *scratch) {
    antigravity_session *session = new_session(engine), *second = new_session(engine);
    collected whole = {0}, part = {0}, cut = {.most = 5};
    antigravity_result result;
    uint32_t tokens[200];
    size_t count = 0;
    generate(session, PROMPT, SEEDED, &whole, &result);
    promise("a result has its numbers", result.tokens == 24 && result.stop_reason == ANTIGRAVITY_STOP_LENGTH
            && result.seed == 7 && result.prompt_tokens > 1, "wrong");
    antigravity_session_rewind(session, 0);
    generate(session, PROMPT, SEEDED, &cut, &result);
    promise("a callback cancels", result.stop_reason == ANTIGRAVITY_STOP_CANCELLED && result.tokens == 5, cut.text);
    int32_t saved = antigravity_session_save(session, scratch, strlen(scratch));
    int32_t loaded = antigravity_session_load(second, scratch, strlen(scratch));
    strcpy(part.text, cut.text), part.length = cut.length;
    generate(session, NULL, "{\"num_tokens\": 19}", &part, &result);
    promise("a cancelled text continues as if it had not stopped", !strcmp(part.text, whole.text), part.text);
    strcpy(part.text, cut.text), part.length = cut.length;
    generate(second, NULL, "{\"num_tokens\": 19}", &part, &result);
    promise("so does a saved one in another session", !saved && !loaded && !strcmp(part.text, whole.text), part.text);
    antigravity_session_tokens(second, tokens, 200, &count);
    antigravity_session_rewind(second, count - 10);
    size_t after = 0;
    antigravity_session_tokens(second, tokens, 200, &after);
    promise("a session is rewound", count > 20 && after == count - 10, "another length");
    collected again = {0}, nested = {.session = second};
    generate(second, PROMPT, SEEDED, &again, &result);
    promise("a prompt that a session holds is not computed again", !strcmp(again.text, whole.text)
            && result.prompt_tokens == 1, again.text);
    generate(second, PROMPT, SEEDED, &nested, &result);
    promise("a callback cannot use its session", nested.nested == ANTIGRAVITY_ERROR_USAGE, "it could");
    antigravity_session_free(session), antigravity_session_free(second);
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    const char *model = argv[1], *asset = argv[2];
    promise("the versions of header and library agree", antigravity_abi_version() == ANTIGRAVITY_ABI_VERSION,
            "differ");
    promise("version and model are told", strstr(antigravity_version(), "0.") && strstr(antigravity_model_info(),
            "\"vocab_size\""), antigravity_model_info());
    antigravity_engine *engine = load(model);
    antigravity_session *session = new_session(engine);
    static collected expected, other;
    generate(session, PROMPT, GREEDY, &expected, NULL);
    uint32_t ids[64];
    char text[256];
    size_t count = 0, length = 0;
    antigravity_tokenize(engine, PROMPT, strlen(PROMPT), 0, ids, 64, &count);
    antigravity_detokenize(engine, ids, count, text, 256, &length);
    promise("tokens become their text again", length == strlen(PROMPT) && !memcmp(text, PROMPT, length), text);
    double sums[2];
    const char *texts = "[\" time\", \" dog\"]";
    promise("a likely text has the higher score", !antigravity_score(engine, "Once upon a", 11, texts, strlen(texts),
            sums, 2, &count) && count == 2 && sums[1] < sums[0] && sums[0] < 0, antigravity_last_error());
    antigravity_free(engine);
    promise("a session outlives its engine", !generate(session, PROMPT, GREEDY, &other, NULL)
            && !strcmp(expected.text, other.text), other.text);
    antigravity_session_free(session);

    int fd = open(asset, O_RDONLY);
    antigravity_engine *parts[2] = {NULL, load(NULL)};
    int32_t status = antigravity_load_fd(fd, 4100, 0, NULL, 0, &parts[0]);
    if (status) fprintf(stderr, "%s\n", antigravity_last_error());
    close(fd);
    for (int i = 0; i < 2; i++) {
        collected same = {0};
        session = new_session(parts[i]);
        generate(session, PROMPT, GREEDY, &same, NULL);
        promise(i ? "the model inside the library gives its text" : "so does a part of a file",
                !strcmp(expected.text, same.text), same.text);
        antigravity_session_free(session), antigravity_free(parts[i]);
    }
    engine = load(model);
    continue_texts(engine, argv[3]);
    run_threads(engine, expected.text);
    cancel_from_thread(model);
    refuse_bad_arguments(engine, model);
    antigravity_free(engine);
    load_often(atoi(argv[4]));
    return 0;
}
