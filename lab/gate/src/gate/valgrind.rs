//! Client requests: the messages of a program to the callgrind that it runs under. Without
//! callgrind they do nothing.
//!
//! The numbers come from `callgrind.h` and `valgrind.h`. Those files say that the numbers never
//! change.

const TOOL: u64 = (b'C' as u64) << 24 | (b'T' as u64) << 16;
const DUMP: u64 = TOOL;
const ZERO: u64 = TOOL + 1;
const START: u64 = TOOL + 4;

/// From now on instructions are counted.
pub fn start() {
    request(START);
}

/// Forgets what was counted.
pub fn zero() {
    request(ZERO);
}

/// Writes what was counted to files, one a thread, and forgets it.
pub fn dump() {
    request(DUMP);
}

fn request(number: u64) {
    let arguments = [number, 0, 0, 0, 0, 0];
    // SAFETY: the rotations leave RDI as it was (64 and 128 bits in all), and RBX is exchanged with
    // itself. Valgrind knows the sequence, reads the six words that RAX points to, and puts an
    // answer in RDX.
    unsafe {
        std::arch::asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") arguments.as_ptr(),
            inout("rdx") 0u64 => _,
        );
    }
}
