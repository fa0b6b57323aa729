//! The allocator of the `downbeat` program is mimalloc. If mimalloc aligns a block anyway, the
//! cheaper call without an alignment is used.

use std::alloc::{GlobalAlloc, Layout};

use libmimalloc_sys as sys;
use mimalloc::MiMalloc;

/// The alignment that every block of mimalloc of at least as many bytes has (`MI_MAX_ALIGN_SIZE`).
const NATURAL: usize = 16;

/// mimalloc, without its calls for aligned blocks if every block has the alignment anyway.
///
/// Example: 3 KB aligned to 8 bytes. mimalloc's call for aligned blocks allocates more than 3 KB
/// and looks for an aligned place. Yet every block of 16 bytes or more is aligned to 16. The plain
/// call therefore gives an aligned block too, and costs less.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mimalloc;

fn is_natural(size: usize, align: usize) -> bool {
    align <= NATURAL && align <= size
}

unsafe extern "C" {
    fn mi_collect(force: bool);
}

/// Gives free memory back to the system. On its own, mimalloc does so only while the program
/// allocates.
pub fn release_memory() {
    // SAFETY: the call frees no block that is in use, and any thread may make it.
    unsafe { mi_collect(true) };
}

// SAFETY: mimalloc is an allocator. Each block has its alignment: from mimalloc's calls for aligned
// blocks, or because all blocks have that alignment (`is_natural`).
unsafe impl GlobalAlloc for Mimalloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_natural(layout.size(), layout.align()) {
            // SAFETY: any size may be asked for.
            return unsafe { sys::mi_malloc(layout.size()) }.cast();
        }
        // SAFETY: the caller makes the promises that mimalloc's crate asks for.
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_natural(layout.size(), layout.align()) {
            // SAFETY: any size may be asked for.
            return unsafe { sys::mi_zalloc(layout.size()) }.cast();
        }
        // SAFETY: the caller makes the promises that mimalloc's crate asks for.
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller has the block from this allocator, which has it from mimalloc.
        unsafe { MiMalloc.dealloc(pointer, layout) };
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if is_natural(size, layout.align()) {
            // SAFETY: the caller has the block from this allocator, which has it from mimalloc.
            return unsafe { sys::mi_realloc(pointer.cast(), size) }.cast();
        }
        // SAFETY: as above.
        unsafe { MiMalloc.realloc(pointer, layout, size) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_as_asked_for_and_keep_their_bytes() {
        for (align, size) in (0..8).flat_map(|align| (0..200).map(move |size| (1usize << align, 1 + size * 37))) {
            let layout = Layout::from_size_align(size, align).unwrap();
            let larger = Layout::from_size_align(2 * size + 1, align).unwrap();
            // SAFETY: the layouts have bytes, and each block is written and freed within its
            // layout.
            unsafe {
                let block = Mimalloc.alloc(layout);
                block.write_bytes(7, size);
                let block = Mimalloc.realloc(block, layout, larger.size());
                let zeroed = Mimalloc.alloc_zeroed(layout);
                assert_eq!((block as usize % align, zeroed as usize % align), (0, 0), "{layout:?}");
                assert!((0..size).all(|at| block.add(at).read() == 7 && zeroed.add(at).read() == 0), "{layout:?}");
                Mimalloc.dealloc(block, larger);
                Mimalloc.dealloc(zeroed, layout);
            }
        }
    }
}
