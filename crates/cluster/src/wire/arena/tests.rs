use super::*;

/// A region of 16 pages, 15 of them for tensors, and its reader.
pub fn both() -> (Arc<Arena>, PeerArena) {
    let arena = Arc::new(Arena::new(16 * PAGE as u64).unwrap());
    arena.is_read(true);
    let file = arena.region.file().try_clone_to_owned().unwrap();
    (arena, PeerArena(PeerRegion::open(file, MOST).unwrap()))
}

#[test]
fn what_is_kept_is_read_until_nobody_has_it() {
    let (arena, peer) = both();
    let tensor = Bytes::from(vec![7; 3 * PAGE]);
    let kept = arena.keep(tensor.clone());
    let place = arena.place_of(&kept).unwrap();
    assert_eq!((peer.read(place, 3 * PAGE).unwrap(), &kept), (Some(tensor.clone()), &tensor));
    let copy = kept.clone();
    drop(kept);
    assert!(peer.read(place, 8).unwrap().is_some());
    drop(copy);
    assert_eq!(peer.read(place, 8), Some(None), "it is gone");
    let next = arena.keep(vec![8; 3 * PAGE].into());
    assert_eq!(
        (arena.place_of(&next).unwrap().page, peer.read(place, 8)),
        (place.page, Some(None)),
        "another is there"
    );
}

#[test]
fn reading_past_a_region_is_refused() {
    let (arena, peer) = both();
    let kept = arena.keep(vec![7; 2 * PAGE].into());
    let Place { page, number } = arena.place_of(&kept).unwrap();
    assert!(
        peer.read(Place { page, number }, 16 * PAGE).is_none()
            && peer.read(Place { page, number }, usize::MAX).is_none()
    );
    assert!(
        peer.read(Place { page: 16, number }, 1).is_none() && peer.read(Place { page: u32::MAX, number }, 1).is_none()
    );
    assert_eq!(peer.read(Place { page, number: number + 1 }, 1), Some(None));
}

#[test]
fn what_is_small_has_no_room_or_no_reader_stays_where_it_is() {
    let (arena, _peer) = both();
    let stays = |bytes: usize| arena.place_of(&arena.keep(vec![1; bytes].into())).is_none();
    assert!(stays(IN_FRAME) && !stays(IN_FRAME + 1) && stays(16 * PAGE));
    let all: Vec<Bytes> = (0..7).map(|_| arena.keep(vec![1; 2 * PAGE].into())).collect();
    assert!(all.iter().all(|kept| arena.place_of(kept).is_some()) && stays(2 * PAGE));
    // Pages that are given back in any order become one piece again.
    let (even, odd): (Vec<_>, Vec<_>) = all.into_iter().enumerate().partition(|(place, _)| place % 2 == 0);
    drop((even, odd));
    assert!(!stays(15 * PAGE));
    arena.is_read(false);
    assert!(stays(2 * PAGE));
}

#[tokio::test]
async fn processes_of_this_machine_are_handed_a_region() {
    let (arena, _) = both();
    let node = NodeId(u64::from(std::process::id()) << 32 | 0x5eed);
    assert!(PeerArena::of(node).await.unwrap().is_none(), "nobody hands it out");
    let kept = arena.keep(vec![9; 2 * PAGE].into());
    let place = arena.place_of(&kept).unwrap();
    let handed = tokio::spawn(arena.hand_out(node));
    tokio::task::yield_now().await;
    assert_eq!(PeerArena::of(node).await.unwrap().unwrap().read(place, 2), Some(Some(vec![9, 9].into())));
    handed.abort();
}

#[tokio::test]
async fn revocable_memory_is_refused_and_silent_peers_are_not_awaited() {
    use rustix::fd::AsFd;
    let node = NodeId(u64::from(std::process::id()) << 32 | 0xbad);
    let listener = UnixListener::bind(socket(node)).unwrap();
    let strange = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        give(&stream, memory.as_fd()).unwrap();
        // The peer sends neither a byte nor a file.
        let _silent = listener.accept().await.unwrap();
        std::future::pending::<()>().await
    });
    assert_eq!(PeerArena::of(node).await.err().unwrap().to_string(), "its length may change");
    assert!(PeerArena::of(node).await.unwrap().is_none());
    strange.abort();
}
