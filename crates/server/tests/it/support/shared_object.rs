//! A shared memory object as a client makes it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};

static COUNT: AtomicU32 = AtomicU32::new(0);

/// Filled with zeros; gone when dropped.
pub struct SharedObject {
    /// The name, with the leading slash.
    pub key: String,
    file: File,
}

impl SharedObject {
    pub fn new(name: &str, size: u64) -> Self {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let key = format!("/downbeat-test-{}-{count}-{name}", std::process::id());
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(format!("/dev/shm{key}")).unwrap();
        file.set_len(size).unwrap();
        SharedObject { key, file }
    }

    pub fn write(&self, offset: u64, data: &[u8]) {
        self.file.write_all_at(data, offset).unwrap();
    }

    pub fn read(&self, offset: u64, size: usize) -> Vec<u8> {
        let mut data = vec![0; size];
        self.file.read_exact_at(&mut data, offset).unwrap();
        data
    }

    pub fn resize(&self, size: u64) {
        self.file.set_len(size).unwrap();
    }

    pub fn size(&self) -> u64 {
        self.file.metadata().unwrap().len()
    }

    pub fn unlink(&self) {
        let _ = std::fs::remove_file(format!("/dev/shm{}", self.key));
    }
}

impl Drop for SharedObject {
    fn drop(&mut self) {
        self.unlink();
    }
}
