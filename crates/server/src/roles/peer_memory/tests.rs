use super::*;

#[tokio::test]
async fn what_is_said_of_memory_is_read_as_it_was_written_and_nothing_longer() {
    let offer = Offer::default();
    assert_eq!(read_offer(&mut &written(Some(&offer))[..]).await.unwrap(), Some(offer));
    assert_eq!(read_offer(&mut &written(None)[..]).await.unwrap(), None);
    let long = u16::MAX.to_le_bytes();
    assert!(matches!(read_offer(&mut &long[..]).await, Err(WireError::TooLarge { announced: 65_535, .. })));
    assert!(matches!(read_offer(&mut &[4, 0, 1][..]).await, Err(WireError::Ended(_))));
    assert!(matches!(read_offer(&mut &[2, 0, 0xff, 0xff][..]).await, Err(WireError::Garbled(_))));
}

#[test]
fn transports_are_said_as_they_are_read() {
    for transport in [Transport::Tcp, Transport::Ucx, Transport::SharedMemory] {
        assert_eq!(Transport::of_byte(transport.byte()), transport);
    }
    assert_eq!(Transport::of_byte(7), Transport::Tcp);
}
