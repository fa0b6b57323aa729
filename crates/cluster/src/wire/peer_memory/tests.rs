use super::*;

#[tokio::test]
async fn what_is_said_of_memory_is_read_as_it_was_written_and_nothing_longer() {
    assert_eq!(read_offer(&mut &written(None)[..]).await.unwrap(), None);
    let long = u16::MAX.to_le_bytes();
    assert!(matches!(read_offer(&mut &long[..]).await, Err(WireError::TooLarge { announced: 65_535, .. })));
    assert!(matches!(read_offer(&mut &[4, 0, 1][..]).await, Err(WireError::Ended(_))));
}

#[cfg(feature = "ucx")]
#[tokio::test]
async fn an_offer_is_read_as_it_was_written_and_a_garbled_one_is_refused() {
    let offer = Offer::default();
    assert_eq!(read_offer(&mut &written(Some(&offer))[..]).await.unwrap(), Some(offer));
    assert!(matches!(read_offer(&mut &[2, 0, 0xff, 0xff][..]).await, Err(WireError::Garbled(_))));
}

#[cfg(not(feature = "ucx"))]
#[tokio::test]
async fn a_build_without_ucx_passes_over_the_offer_of_a_peer_that_has_it() {
    let mut bytes = &[2, 0, 0xff, 0xff, 7][..];
    assert_eq!(read_offer(&mut bytes).await.unwrap(), Some(Offer));
    assert_eq!(bytes, [7], "the peer's next byte is left");
}

#[test]
fn transports_are_said_as_they_are_read() {
    for transport in [Transport::Tcp, Transport::Ucx, Transport::SharedMemory] {
        assert_eq!(Transport::of_byte(transport.byte()), transport);
    }
    assert_eq!(Transport::of_byte(7), Transport::Tcp);
}
