//! Divides long work on one thread into steps. Readers and writers of large bodies call [`step`]
//! after each slice. At a step the thread may let other work go first, or end the work.

use std::cell::RefCell;

type Hook = Box<dyn FnMut(u64)>;

thread_local! {
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
}

/// Runs `work`, and calls `hook` with the bytes of each of its [`step`]s. The hook may block. It
/// ends the work with [`std::panic::resume_unwind`], so that no reader needs to tell "stopped" from
/// its own errors.
pub fn with<T>(hook: impl FnMut(u64) + 'static, work: impl FnOnce() -> T) -> T {
    let _reset = Reset(HOOK.replace(Some(Box::new(hook))));
    work()
}

/// Restores the previous hook.
struct Reset(Option<Hook>);

impl Drop for Reset {
    fn drop(&mut self) {
        HOOK.set(self.0.take());
    }
}

/// Bytes that an entry of a long list counts for, such as a folder or a model. Other work has a
/// turn after some hundred entries.
pub const ENTRY: u64 = 1 << 10;

/// Reports that the thread has read or written about this many more bytes. Work without a hook
/// continues at once.
pub fn step(bytes: u64) {
    HOOK.with_borrow_mut(|hook| {
        if let Some(hook) = hook {
            hook(bytes);
        }
    });
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn the_hook_counts_the_steps_of_its_own_work_alone() {
        let read = Rc::new(Cell::new(0));
        let counted = read.clone();
        with(move |bytes| counted.set(counted.get() + bytes), || step(5));
        step(7);
        assert_eq!(read.get(), 5);
    }
}
