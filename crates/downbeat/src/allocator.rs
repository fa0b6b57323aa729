//! The program's allocator: mimalloc, asked in the way that costs least.

use std::alloc::{GlobalAlloc, Layout};

use libmimalloc_sys as sys;
use mimalloc::MiMalloc;

/// The alignment that every block of mimalloc of at least as many bytes has (`MI_MAX_ALIGN_SIZE`).
const NATURAL: usize = 16;

/// mimalloc.
///
/// Its calls that take an alignment cost more than those that take none. For 3 KB aligned to 8 bytes they allocate some bytes more and look for
/// an aligned place among them, though every block is aligned so. So they are called only for what no block promises.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mimalloc;

fn is_natural(size: usize, align: usize) -> bool {
    align <= NATURAL && align <= size
}

// SAFETY: mimalloc is an allocator, and its blocks are aligned as asked for: by the calls that take an alignment, or because `is_natural` says that all are.
unsafe impl GlobalAlloc for Mimalloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_natural(layout.size(), layout.align()) {
            // SAFETY: any size may be asked for.
            return unsafe { sys::mi_malloc(layout.size()) }.cast();
        }
        // SAFETY: the caller's promises are those that are asked for.
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_natural(layout.size(), layout.align()) {
            // SAFETY: any size may be asked for.
            return unsafe { sys::mi_zalloc(layout.size()) }.cast();
        }
        // SAFETY: the caller's promises are those that are asked for.
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
            // SAFETY: the layouts have bytes, and each block is written and freed within its layout.
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
