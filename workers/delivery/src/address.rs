//! Which addresses a webhook may go to (field case S5). Only the public internet, unless the operator names a network. The check sits in the resolver and on literal
//! addresses, so the address that was checked is the one connected to; redirects are off.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// Why the address is refused; None when a webhook may go there.
pub fn refusal(address: IpAddr, allow: &[IpNet]) -> Option<&'static str> {
    if allow.iter().any(|network| network.contains(&address)) {
        return None;
    }
    match address {
        IpAddr::V4(v4) => v4_refusal(v4),
        IpAddr::V6(v6) => match embedded(v6) {
            Some(v4) if allow.iter().any(|network| network.contains(&IpAddr::V4(v4))) => None,
            Some(v4) => v4_refusal(v4),
            None => v6_refusal(v6),
        },
    }
}

/// Special-purpose IPv4 networks (IANA registry, RFC 6890).
fn v4_refusal(address: Ipv4Addr) -> Option<&'static str> {
    let [a, b, c, _] = address.octets();
    Some(match (a, b, c) {
        (127, ..) => "a loopback address",
        (169, 254, _) => "a link-local or metadata address",
        (10, ..) | (172, 16..=31, _) | (192, 168, _) => "a private address",
        (100, 64..=127, _) => "a shared address (RFC 6598)",
        (0, ..) | (192, 0, 0 | 2) | (198, 18 | 19, _) | (198, 51, 100) | (203, 0, 113) | (192, 88, 99) | (224..=255, ..) => {
            "an address with a special purpose"
        }
        _ => return None,
    })
}

fn v6_refusal(address: Ipv6Addr) -> Option<&'static str> {
    let first = address.segments()[0];
    if address == Ipv6Addr::LOCALHOST {
        return Some("a loopback address");
    }
    // Global unicast is 2000::/3; documentation and Teredo are taken out of it.
    let documentation = first == 0x2001 && address.segments()[1] == 0xdb8 || first == 0x3fff;
    let teredo = first == 0x2001 && address.segments()[1] == 0;
    (first & 0xe000 != 0x2000 || documentation || teredo).then_some("a private address or one with a special purpose")
}

/// The IPv4 address inside a mapped, translated (RFC 6052) or 6to4 one.
fn embedded(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = address.segments();
    let v4 = |high: u16, low: u16| Ipv4Addr::from(u32::from(high) << 16 | u32::from(low));
    match s {
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(v4(high, low)),
        [0, 0, 0, 0, 0, 0, high, low] if high != 0 => Some(v4(high, low)),
        [0x2002, high, low, ..] => Some(v4(high, low)),
        _ => None,
    }
}

/// Resolves names and leaves out what is refused.
pub struct Resolver {
    pub allow: Vec<IpNet>,
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let allow = self.allow.clone();
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let first_refusal = found.iter().find_map(|address| refusal(address.ip(), &allow).map(|why| (address.ip(), why)));
            let good: Vec<SocketAddr> = found.into_iter().filter(|address| refusal(address.ip(), &allow).is_none()).collect();
            match (good.is_empty(), first_refusal) {
                (true, Some((address, why))) => {
                    Err(Box::new(RefusedAddress(format!("{} is {address}, {why}", name.as_str())))
                        as Box<dyn std::error::Error + Send + Sync>)
                }
                _ => Ok(Box::new(good.into_iter()) as Addrs),
            }
        })
    }
}

/// A name that resolves to refused addresses only.
#[derive(Debug)]
pub struct RefusedAddress(pub String);

impl std::fmt::Display for RefusedAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RefusedAddress {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_loopback_and_metadata_addresses_are_refused_in_every_spelling() {
        let spellings = [
            "http://127.0.0.1/",
            "http://2130706433/",
            "http://0x7f.1/",
            "http://0177.0.0.1/",
            "http://[::1]/",
            "http://[::ffff:169.254.169.254]/",
            "http://169.254.169.254/latest/meta-data",
            "http://10.0.0.8/",
            "http://172.31.0.1/",
            "http://192.168.1.1/",
            "http://100.64.0.1/",
            "http://0.0.0.0/",
            "http://[fd00::1]/",
            "http://[fe80::1]/",
            "http://[64:ff9b::a9fe:a9fe]/",
            "http://[2002:7f00:1::]/",
            "http://[::127.0.0.1]/",
            "http://224.0.0.1/",
        ];
        for text in spellings {
            let url: url::Url = text.parse().expect(text);
            let address = match url.host() {
                Some(url::Host::Ipv4(v4)) => IpAddr::V4(v4),
                Some(url::Host::Ipv6(v6)) => IpAddr::V6(v6),
                other => panic!("{text}: {other:?}"),
            };
            assert!(refusal(address, &[]).is_some(), "{text} is {address}");
        }
        for public in ["93.184.216.34", "2606:2800:220:1::1", "8.8.8.8"] {
            assert_eq!(refusal(public.parse().expect(public), &[]), None, "{public}");
        }
    }

    /// Field case S5: what counts is the address that a name has at the moment of connecting, whatever it had before.
    #[tokio::test]
    async fn a_name_of_a_refused_address_resolves_to_nothing() {
        let refused = Resolver { allow: Vec::new() }.resolve("localhost".parse().expect("name")).await;
        let told = refused.err().expect("refused").to_string();
        assert!(told.contains("localhost is ") && told.contains("loopback"), "{told}");
        let allow = vec!["127.0.0.0/8".parse().expect("network"), "::1/128".parse().expect("network")];
        assert!(Resolver { allow }.resolve("localhost".parse().expect("name")).await.is_ok());
    }

    #[test]
    fn the_operator_s_networks_are_allowed_and_nothing_beside_them() {
        let allow = ["127.0.0.0/8".parse().expect("network")];
        assert_eq!(refusal("127.0.0.1".parse().expect("address"), &allow), None);
        assert_eq!(refusal("::ffff:127.0.0.1".parse().expect("address"), &allow), None);
        assert!(refusal("10.0.0.1".parse().expect("address"), &allow).is_some());
    }
}
