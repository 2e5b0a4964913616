//! Directories that go when a test ends.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A directory of its own, removed with everything in it.
pub struct TestDir(pub PathBuf);

impl TestDir {
    pub fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let unique = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(format!("antigravity-test-{}-{}", unique.0, unique.1));
        std::fs::create_dir_all(&dir).expect("a temporary directory");
        Self(dir)
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The path of a file as a command takes it.
    pub fn path(&self, name: &str) -> String {
        self.file(name).to_str().expect("UTF-8").to_string()
    }

    /// Writes a file; its path.
    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        std::fs::write(self.file(name), bytes).expect("a temporary file");
        self.path(name)
    }

    /// Puts the bundled model's files here, but for `except`; the directory as a command takes it.
    #[cfg(unix)]
    pub fn model_without(&self, except: &str) -> String {
        let model = super::paths::model();
        for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
            if name != except {
                std::fs::copy(model.join(name), self.file(name)).expect("a copy");
            }
        }
        let weights = "model.safetensors";
        if except != weights {
            std::os::unix::fs::symlink(model.join(weights), self.file(weights)).expect("a link");
        }
        self.path("").trim_end_matches('/').to_string()
    }

    /// Writes a program that only the system's shell understands. Another process does it: a program that this one has
    /// open for writing could not be started as long as a child that another test has just forked has it open, too.
    pub fn script(&self, name: &str, body: &str) -> PathBuf {
        let (path, write) =
            (self.file(name), "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$0\" && chmod +x \"$0\"");
        let written = Command::new("sh").args(["-c", write]).arg(&path).arg(body).status();
        assert!(written.expect("a shell").success());
        path
    }

    /// This directory with another file.
    pub fn with(self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        self.write(name, bytes);
        self
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
